"""Copies that can travel as one: neighbours at home that go to neighbouring slots of one allocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs_of(keys: Sequence[int], slots: Sequence[int], chunk_slots: int) -> Iterator[tuple[int, int, int]]:
    """Join copies, in their order; gives (first key, first slot, count) of each.

    chunk_slots: slots of one allocation, which a copy cannot cross.
    """
    begin = 0
    for index in range(1, len(keys) + 1):
        if (
            index < len(keys)
            and keys[index] == keys[index - 1] + 1
            and slots[index] == slots[index - 1] + 1
            and slots[index] % chunk_slots
        ):
            continue
        yield keys[begin], slots[begin], index - begin
        begin = index
