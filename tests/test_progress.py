"""The progress line on a terminal and in a log."""

from __future__ import annotations

import io

from glm53srv.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_tenth() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    for i in range(101):
        line(i / 100, f"layer {i}")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "loading   0% layer 0"
    assert lines[-1] == "loading 100% layer 100"


def test_a_terminal_line_is_redrawn_and_ended_once() -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    line(0.5, "a long stage")
    line(1.0, "ready")
    line(1.0, "again")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    first, second = text.rstrip("\n").split("\r")[1:]
    assert "[###############...............]  50% a long stage" in first
    assert len(second) >= len(first)  # the longer line before it is covered
