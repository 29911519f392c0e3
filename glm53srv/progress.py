"""One progress line while the model loads: redrawn on a terminal, a plain line per tenth elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from glm53srv.transfer_rate import format_time

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0..1 and never falling, and a short name of the stage."""

BAR_WIDTH = 30

_MIN_ELAPSED_S = 2.0
"""The time left is told from here on: what takes less needs no telling, and the first stages say little."""


class ProgressLine:
    """Draws progress on a text stream. Called from one thread, the one that loads.

    With a terminal the line is redrawn in place and ended by a line break at 1; without one (a log file, a
    container) a line is written each time another tenth is done, so that a log stays short. With
    tells_time_left the rest is estimated from what the part that is done took. clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        label: str = "loading",
        tells_time_left: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._label = label
        self._is_terminal = stream.isatty()
        self._last_tenth = -1
        self._last_width = 0
        self._is_done = False
        self._tells_time_left = tells_time_left
        self._clock = clock
        self._begin_s: float | None = None

    def __call__(self, fraction: float, stage: str) -> None:
        """Show that `fraction` (0..1) is done and `stage` is running."""
        if self._is_done:
            return
        fraction = min(max(fraction, 0.0), 1.0)
        self._is_done = fraction >= 1.0
        stage += self._time_left(fraction)
        if self._is_terminal:
            self._redraw(fraction, stage)
        elif int(fraction * 10) > self._last_tenth:
            self._last_tenth = int(fraction * 10)
            self._stream.write(f"{self._label} {fraction:4.0%} {stage}\n")
            self._stream.flush()

    def _time_left(self, fraction: float) -> str:
        now = self._clock()
        if self._begin_s is None:
            self._begin_s = now
        elapsed_s = now - self._begin_s
        if not self._tells_time_left or self._is_done or elapsed_s < _MIN_ELAPSED_S or fraction <= 0:
            return ""
        return f", {format_time(elapsed_s * (1 - fraction) / fraction)} left"

    def _redraw(self, fraction: float, stage: str) -> None:
        filled = round(fraction * BAR_WIDTH)
        line = f"{self._label} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {fraction:4.0%} {stage}"
        self._stream.write("\r" + line.ljust(self._last_width) + ("\n" if self._is_done else ""))
        self._stream.flush()
        self._last_width = len(line)
