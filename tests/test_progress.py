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


def test_the_time_left_is_told_once_there_is_something_to_go_by() -> None:
    now = 100.0
    stream = io.StringIO()
    line = ProgressLine(stream, tells_time_left=True, clock=lambda: now)
    line(0.0, "tokenizer")
    now = 101.0
    line(0.1, "layer 1")
    now = 110.0
    line(0.2, "experts 20.0 GB, 2.00 GB/s")
    now = 150.0
    line(1.0, "ready")
    assert stream.getvalue().splitlines() == [
        "loading   0% tokenizer",
        "loading  10% layer 1",
        "loading  20% experts 20.0 GB, 2.00 GB/s, 40 s left",
        "loading 100% ready",
    ]


def test_a_line_whose_stages_tell_the_time_themselves_adds_none() -> None:
    now = 0.0
    stream = io.StringIO()
    line = ProgressLine(stream, clock=lambda: now)
    line(0.1, "a")
    now = 10.0
    line(0.2, "b")
    assert "left" not in stream.getvalue()
