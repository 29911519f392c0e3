"""What can go wrong with a measurement, apart from its outcome.

    BenchError           it cannot be made                          exit code 2
    |-- ServerDown       nothing answers at the address
    |-- ServerRefused    the server answers with an error status
    |-- StreamBroken     an event stream ended wrongly
    `-- BadInput         a file or flag is wrong

Exit codes of every command here: 0 passed, 1 measured and below a threshold, 2 could not be measured.
"""

from __future__ import annotations


class BenchError(Exception):
    """A measurement cannot be made; the text is one line that says why and what to change."""


class ServerDown(BenchError):
    """Nothing answers at the address, or the connection broke."""


class ServerRefused(BenchError):
    """The server answered with an error. status: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StreamBroken(BenchError):
    """An event stream broke off, or holds something that is no event."""


class BadInput(BenchError):
    """A file or a flag is wrong."""
