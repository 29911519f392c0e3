"""Adds up what a device did from the intervals of its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]
"""Begin and end on the device's clock, in microseconds."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Microseconds of a profiled span: with a kernel running, with a copy, with both, with neither."""

    span: float
    compute: float
    copies: float
    both: float

    @property
    def neither(self) -> float:
        """The device was idle."""
        return self.span - self.compute - self.copies + self.both


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that overlap or touch; gives them in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def total(intervals: Iterable[Interval]) -> float:
    """Add up merged intervals."""
    return sum(end - begin for begin, end in intervals)


def intersection(first: list[Interval], second: list[Interval]) -> float:
    """Give the time that two lists of merged intervals share."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def lanes_of(kernels: Iterable[Interval], copies: Iterable[Interval]) -> Lanes:
    """Split the span from the first to the last event."""
    busy, moving = merge(kernels), merge(copies)
    ends = [edge for interval in (*busy, *moving) for edge in interval]
    span = max(ends) - min(ends) if ends else 0.0
    return Lanes(span, total(busy), total(moving), intersection(busy, moving))
