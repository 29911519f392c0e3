"""What every command here gives: a JSON document, a table, checks against thresholds, an exit code."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from bench.client import Client
from bench.errors import BadInput, BenchError
from bench.facts import machine_facts, server_facts, utc_now

FORMAT = "glm53srv-bench-1"
PASSED, FAILED, NOT_MEASURED = 0, 1, 2
"""Exit codes."""


@dataclass(frozen=True, slots=True)
class Check:
    """One value against one limit. at_least: the limit is the smallest good value, else the largest."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Tell whether the value is good; NaN never is."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """Give it in one line for people."""
        sign = ">=" if self.at_least else "<="
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name} {self.value:.6g} (wanted {sign} {self.limit:.6g})"


@dataclass(slots=True)
class Report:
    """A result in the making. result: the command's own part. notes: what a reader must know about it."""

    tool: str
    command: Sequence[str]
    machine: dict[str, Any] = field(default_factory=machine_facts)
    started: str = field(default_factory=utc_now)
    server_before: dict[str, Any] | None = None
    server_after: dict[str, Any] | None = None
    result: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Tell whether every check passed."""
        return all(check.passed for check in self.checks)

    def document(self) -> dict[str, Any]:
        """Give the whole as JSON values."""
        return {
            "format": FORMAT,
            "tool": self.tool,
            "command": list(self.command),
            "started": self.started,
            "finished": utc_now(),
            "machine": self.machine,
            "server_before": self.server_before,
            "server_after": self.server_after,
            "result": self.result,
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            "notes": self.notes,
            "passed": self.passed,
        }

    def write(self, path: Path | None) -> None:
        """Write the document, if a path is given. Raises BadInput when it cannot be written."""
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"--out {path}: cannot be written: {error.strerror}") from error


class Progress:
    """Writes a line for each thing that is done, at once, on the terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __call__(self, line: str) -> None:
        """Write one line."""
        if self._stream is not None:
            self._stream.write(line + "\n")
            self._stream.flush()


def read_result(path: Path, tool: str | None = None) -> dict[str, Any]:
    """Read a document that Report wrote. Raises BadInput if it is something else, or another tool's."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadInput(f"{path}: not a result of these benchmarks (no format {FORMAT!r})")
    if tool is not None and document["tool"] != tool:
        raise BadInput(f"{path}: a result of {document['tool']}, {tool} is needed")
    return document


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Give median, least, largest and all of some measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a table: the first column to the left, the others to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[at]) for row in [list(headers), *cells]) for at in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def client_parser(tool: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a command that talks to a server."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m bench.{tool}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default %(default)s)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument(
        "--timeout-s", type=float, default=1800.0, help="longest silence of the server (default %(default)s)"
    )
    add_output_flags(parser)
    return parser


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command."""
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")


def client_of(options: argparse.Namespace) -> Client:
    """Make the client that the flags describe."""
    return Client(options.url, api_key=options.api_key, timeout_s=options.timeout_s)


def open_report(
    tool: str,
    argv: Sequence[str],
    client: Client | None = None,
    *,
    out: Path | None = None,
    secret: str | None = None,
) -> Report:
    """Begin a report, with what the server says before the run. secret: never written down.

    Raises BadInput when `out` will not be writable: before the measurement, not after it.
    """
    if out is not None and (out.is_dir() or not os.access(_existing_parent(out), os.W_OK)):
        raise BadInput(f"--out {out}: cannot be written")
    words = [word.replace(secret, "***") for word in argv] if secret else argv
    report = Report(tool, [f"bench.{tool}", *words])
    if client is not None:
        report.server_before = server_facts(client)
    return report


def _existing_parent(path: Path) -> Path:
    return next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))


def close_report(report: Report, out: Path | None, text: str, client: Client | None = None) -> int:
    """Print table and checks, write the document; gives the exit code."""
    if client is not None:
        report.server_after = server_facts(client)
    print(text)
    for note in report.notes:
        print(f"note  {note}")
    for check in report.checks:
        print(check.line())
    report.write(out)
    return PASSED if report.passed else FAILED


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command's main and turn what it cannot do into one line and an exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return main(words)
    except BenchError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return NOT_MEASURED
    except KeyboardInterrupt:
        return 130
