"""Copies joined to runs."""

from __future__ import annotations

import random

from glm53srv.offload.device.copy_runs import runs_of


def test_neighbours_travel_together_up_to_the_end_of_an_allocation() -> None:
    keys, slots = [10, 11, 12, 13, 20, 21, 30], [2, 3, 4, 5, 6, 7, 9]
    assert list(runs_of(keys, slots, 4)) == [(10, 2, 2), (12, 4, 2), (20, 6, 2), (30, 9, 1)]


def test_nothing_to_copy() -> None:
    assert list(runs_of([], [], 4)) == []


def test_runs_are_the_copies_they_were_made_of() -> None:
    rng = random.Random(1)
    for _ in range(300):
        count, chunk = rng.randrange(1, 60), rng.choice([1, 3, 32])
        keys = sorted(rng.sample(range(100), count))
        first = rng.randrange(50)
        slots = list(range(first, first + count))
        runs = list(runs_of(keys, slots, chunk))
        copies = [(key + i, slot + i) for key, slot, length in runs for i in range(length)]
        assert copies == list(zip(keys, slots, strict=True))
        assert all(slot // chunk == (slot + length - 1) // chunk for _, slot, length in runs)
        joins = sum(keys[i] + 1 == keys[i + 1] and slots[i + 1] % chunk != 0 for i in range(count - 1))
        assert len(runs) == count - joins
