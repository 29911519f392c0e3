"""Adding up a device's events."""

from __future__ import annotations

import random

from bench.cuda.intervals import Interval, intersection, lanes_of, merge, total


def test_overlapping_and_touching_intervals_are_joined() -> None:
    assert merge([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)]) == [(0.0, 4.0), (5.0, 6.0)]


def test_nothing_happened() -> None:
    lanes = lanes_of([], [])
    assert (lanes.span, lanes.neither) == (0.0, 0.0)


def test_lanes_of_a_span_with_gap_and_overlap() -> None:
    lanes = lanes_of([(0.0, 4.0), (8.0, 10.0)], [(3.0, 5.0)])
    assert (lanes.span, lanes.compute, lanes.copies, lanes.both, lanes.neither) == (10.0, 6.0, 2.0, 1.0, 3.0)


def test_shared_time_is_what_counting_gives() -> None:
    rng = random.Random(3)

    def draw() -> list[Interval]:
        begins = [rng.randrange(200) for _ in range(20)]
        return merge((float(begin), float(begin + rng.randrange(1, 15))) for begin in begins)

    for _ in range(50):
        first, second = draw(), draw()

        def covers(intervals: list[Interval], moment: float) -> bool:
            return any(begin <= moment < end for begin, end in intervals)

        moments = [moment + 0.5 for moment in range(220)]
        counted = sum(covers(first, moment) and covers(second, moment) for moment in moments)
        assert intersection(first, second) == counted
        assert total(first) == sum(covers(first, moment) for moment in moments)
