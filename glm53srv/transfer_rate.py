"""How fast bytes come, and how long the rest will take, as text for a progress line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

GB = 1e9
WINDOW_S = 20.0
"""The rate is that of the last seconds: a cold disk or a busy network shows, one stall is soon forgotten."""

_MIN_SPAN_S = 0.5
"""Under this much time the rate is noise and is left out."""


class TransferRate:
    """Turns "bytes so far" into text. One thread.

    total_bytes: of everything. clock: seconds, monotonic.
    """

    def __init__(self, total_bytes: int, clock: Callable[[], float]) -> None:
        self._total_bytes = total_bytes
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque()

    def text(self, done_bytes: int) -> str:
        """Give "12.3 of 125.3 GB, 0.31 GB/s, 6 min left"; rate and rest only when they are known."""
        now = self._clock()
        self._points.append((now, done_bytes))
        while now - self._points[0][0] > WINDOW_S and len(self._points) > 2:
            self._points.popleft()
        start, start_bytes = self._points[0]
        amount = f"{done_bytes / GB:.2f} of {self._total_bytes / GB:.2f} GB"
        if now - start < _MIN_SPAN_S or done_bytes <= start_bytes:
            return amount
        rate = (done_bytes - start_bytes) / (now - start)
        left = format_time((self._total_bytes - done_bytes) / rate)
        return f"{amount}, {rate / GB:.2f} GB/s, {left} left"


def format_time(seconds: float) -> str:
    """Give a time in the unit a person would use: 42 s, 6 min, 2 h 05 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
