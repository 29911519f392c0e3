"""Which pages hold tokens, and when they get and give memory."""

from __future__ import annotations

import pytest

from glm53srv.engine.base import DecodeRow, EngineLimits
from glm53srv.engine.cuda.sequence_pages import SequencePages

LIMITS = EngineLimits(
    max_streams=4,
    max_context_tokens=4096,
    max_chunk_tokens=64,
    page_tokens=16,
    num_pages=40,
    num_layers=3,
    vocab_size=100,
    eos_token_ids=(1,),
)


class NoMemory(Exception):
    """As torch's, which is not installed here."""


class Room:
    """Notes what is asked. is_open: whether it can be emptied now. most: pages that can have memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_open = True
        self.most = LIMITS.num_pages
        self.num_pages = 0

    def fill(self, num_pages: int) -> None:
        self.calls.append(("fill", num_pages))
        if num_pages > self.most:
            raise NoMemory
        self.num_pages = max(self.num_pages, num_pages)

    def empty(self, num_pages: int) -> bool:
        self.calls.append(("empty", num_pages))
        return self.is_open


@pytest.fixture
def room() -> Room:
    return Room()


def row(slot: int, position: int, pages: tuple[int, ...]) -> DecodeRow:
    return DecodeRow(slot, 5, position, pages)


def test_only_pages_with_tokens_are_given_to_the_kernels(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    owned = (3, 30, 5, 6)
    assert pages.of_chunk(0, owned, 17) == (3, 30)
    assert pages.of_rows([row(0, 31, owned), row(1, 0, (7, 8))]) == [(3, 30), (7,)]
    assert pages.of_rows([row(0, 32, owned)]) == [(3, 30, 5)]


def test_memory_is_asked_for_before_it_is_used_up_to_the_highest_page(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    pages.of_chunk(2, (9, 4), 20)
    assert room.calls == [("fill", 10 + LIMITS.max_streams)]  # rows beside it may each begin one
    pages.of_chunk(3, (39,), 3)
    assert room.calls[-1] == ("fill", LIMITS.num_pages)
    pages.release(3)
    owned = (9, 4, 20)
    pages.of_rows([row(2, 31, owned)])
    assert room.calls[-1] == ("fill", 10)
    pages.of_rows([row(2, 32, owned)])
    assert room.calls[-1] == ("fill", 21)


def test_a_sequence_that_gets_other_pages_is_looked_at_anew(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    assert pages.of_rows([row(0, 5, (3,))]) == [(3,)]
    assert pages.of_rows([row(0, 6, (8, 2))]) == [(8,)]
    assert pages.reach == 9


def test_memory_is_given_back_once_behind_an_end_and_again_if_it_could_not_be(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    pages.of_rows([row(0, 40, (1, 2, 30)), row(1, 0, (4,))])
    room.calls.clear()
    pages.shrink()
    assert room.calls == []  # none has ended
    pages.release(0)
    room.is_open = False
    pages.shrink()
    room.is_open = True
    pages.shrink()
    pages.shrink()
    assert room.calls == [("empty", 5), ("empty", 5)]
    pages.fill(20)
    pages.shrink()
    assert room.calls[2:] == [("fill", 20), ("empty", 5)]


def test_pages_that_are_held_stay_until_they_are_held_no_more(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    pages.hold(40)
    pages.of_rows([row(0, 0, (3,))])
    pages.release(0)
    pages.shrink()
    pages.hold(0)
    pages.shrink()
    assert room.calls == [("fill", 40), ("fill", 40), ("empty", 40), ("fill", 0), ("empty", 0)]


def test_a_chunk_without_memory_keeps_none_from_the_others(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    pages.of_rows([row(0, 0, (3,))])
    room.most = 10
    with pytest.raises(NoMemory):
        pages.of_chunk(1, (20,), 4)
    assert pages.reach == 4
    assert pages.of_rows([row(0, 1, (3,))]) == [(3,)]


def test_rows_whose_pages_have_no_memory_are_told_from_the_others(room: Room) -> None:
    pages = SequencePages(LIMITS, room)
    room.most = 10
    rows = [row(0, 0, (3,)), row(1, 16, (2, 12)), row(2, 5, (9,))]
    pages.of_rows([rows[0], rows[2]])
    with pytest.raises(NoMemory):
        pages.of_rows(rows)
    assert [pages.has_memory(slot) for slot in (0, 1, 2)] == [True, False, True]
    pages.release(1)
    assert pages.of_rows([rows[0], rows[2]]) == [(3,), (9,)]


def test_without_a_room_every_page_has_memory() -> None:
    pages = SequencePages(LIMITS)
    assert pages.of_chunk(0, (1, 2), 30) == (1, 2)
    pages.release(0)
    pages.release(0)
    pages.shrink()
    assert pages.reach == 0
    pages.of_rows([row(0, 0, (39,))])
    assert pages.has_memory(0)
