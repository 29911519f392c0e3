"""Memory that goes from slots to pages and back, beside layers whose sums are checked."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch

from glm53srv.kernels import KernelPool
from glm53srv.model.checkpoint import CodebookName
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.gpu import gpu_offload
from glm53srv.offload.device.gpu.page_memory import PageMemory
from glm53srv.offload.device.gpu.page_room import PageRoom
from glm53srv.offload.device.layout import RecordLayout
from tests.offload_device.builders import random_arena
from tests.offload_device.copy_engine import CopyEngine
from tests.offload_device.gpu import fake_cuda
from tests.offload_device.gpu.card import CHUNK, EXPERTS, HIDDEN, LAYERS, SLOTS, TOP_K, Card
from tests.offload_device.gpu.fake_blocks import BLOCK, FakeBlocks

PAGE_CHUNKS = 2
PAGES = 64


@pytest.fixture(scope="module")
def experts() -> ExpertArena:
    layout = RecordLayout(HIDDEN, 256, (48, 48, 48), CodebookName.MUL1)
    return random_arena(layout, LAYERS, EXPERTS, TOP_K)


class Served:
    """A card, pages that share its memory, and the sum of what both hold at most."""

    def __init__(self, arena: ExpertArena, pool: KernelPool) -> None:
        self.card = Card(arena, pool, "exact", page_chunks=PAGE_CHUNKS)
        self.loans, self.store = self.card.offload.loans, self.card.offload.store
        self.chunk_bytes = CHUNK * arena.layout.record_bytes
        self.source = FakeBlocks()
        self.told: list[int] = []
        self.memory = PageMemory(self.source, PAGES, 4)
        page_values = (PAGE_CHUNKS * self.chunk_bytes + 8 * BLOCK) // PAGES // 2
        self.pages = self.memory.tensor((page_values,), torch.float16)
        self.room = PageRoom(
            self.memory, self.loans, self.card.offload.plan, arena.layout.record_bytes, self.told.append
        )
        self.first = self.room.num_pages

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes + self.room.num_bytes

    def close(self) -> None:
        self.card.offload.close()
        del self.pages
        self.room.close()
        assert (self.source.num_mapped, self.source.num_reserved) == (0, 0)


@pytest.fixture
def served(experts: ExpertArena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    fake_cuda.install(monkeypatch)
    engine = CopyEngine()
    monkeypatch.setattr(gpu_offload, "find_driver_calls", engine.calls)
    with KernelPool(1) as pool:
        made = Served(experts, pool)
        yield made
        made.close()


def test_pages_take_chunks_of_slots_and_give_them_back(served: Served) -> None:
    card, room, loans = served.card, served.room, served.loans
    most = served.num_bytes
    assert 4 <= served.first < PAGES
    card.decode(1)
    for pages, chunks in ((served.first, 0), (served.first + 1, 1), (PAGES, 2)):
        room.fill(pages)
        assert room.num_pages >= pages
        assert loans.page_slots == chunks * CHUNK
        assert card.offload.policy.capacity == SLOTS - chunks * CHUNK
        assert served.num_bytes <= most
        card.decode(2)
    card.check_slots()
    assert room.empty(0)
    assert (loans.page_slots, room.num_pages) == (0, served.first)
    assert card.offload.policy.capacity == SLOTS
    for _ in range(4):
        card.decode(1)
    card.check_slots()


def test_some_pages_more_than_are_used_stay_with_them(served: Served) -> None:
    room, loans = served.room, served.loans
    pages_of_a_chunk = PAGES * served.chunk_bytes // served.memory.bytes_for(PAGES)
    spare = served.first  # less than half a chunk here: what is theirs from the start is as little
    assert spare < pages_of_a_chunk // 2
    room.fill(PAGES)
    for used, kept in (
        (served.first + pages_of_a_chunk - spare + 2, 2),
        (served.first + pages_of_a_chunk - spare - 2, 1),
        (2, 1),
        (0, 0),
    ):
        room.empty(used)
        assert loans.page_slots == kept * CHUNK


def test_pages_that_fill_beside_a_staged_chunk_take_none_of_its_slots(served: Served) -> None:
    card, room = served.card, served.room
    most = served.num_bytes
    steps = iter((served.first + 1, PAGES))

    def fill() -> None:
        pages = next(steps, None)
        if pages is not None:
            room.fill(pages)
            assert room.num_pages >= pages
        assert served.num_bytes <= most
        assert not room.empty(1)  # not beside a chunk
        card.decode(1)

    for _ in range(3):
        card.decode(1)
    card.prefill(100, is_more_waiting=True, between=fill)
    card.prefill(100)
    assert served.loans.page_slots == 2 * CHUNK
    assert card.offload.policy.capacity == SLOTS - 2 * CHUNK
    assert served.num_bytes <= most
    card.decode(1)
    card.check_slots()
    assert room.empty(0)
    card.prefill(40)
    assert card.offload.policy.capacity == SLOTS
    card.decode(1)
    card.check_slots()


def test_whatever_comes_in_whatever_order_the_sums_are_right(served: Served) -> None:
    card, room, drawn = served.card, served.room, random.Random(11)
    most = served.num_bytes

    def fill() -> None:
        if drawn.random() < 0.4:
            room.fill(drawn.randint(1, PAGES))
        if drawn.random() < 0.5:
            card.decode(drawn.randint(1, 2))

    for _ in range(14):
        fill()
        if drawn.random() < 0.5:
            room.empty(drawn.randint(0, PAGES))
        if drawn.random() < 0.6:
            card.prefill(drawn.choice((5, 40, 100)), is_more_waiting=drawn.random() < 0.4, between=fill)
        card.offload.policy.check_integrity()
        assert served.num_bytes <= most
        lent = served.loans.page_slots * served.chunk_bytes // CHUNK
        assert room.num_bytes <= served.memory.bytes_for(served.first) + lent + BLOCK
    card.prefill(40)
    room.empty(0)
    assert card.offload.policy.capacity == SLOTS
    card.check_slots()


def test_others_are_limited_before_pages_take_and_let_go_when_they_have_given(served: Served) -> None:
    told = served.told
    served.room.fill(PAGES)
    assert told[-1] == served.memory.bytes_for(PAGES)
    served.room.empty(0)
    assert told[-1] == served.room.num_bytes == served.memory.bytes_for(served.first)


def test_a_card_that_another_process_filled_keeps_the_slots_lent(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card, room = served.card, served.room
    usual = served.store.take_back

    def refuse(slots: range) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    room.fill(PAGES)
    monkeypatch.setattr(served.store, "take_back", refuse)
    with caplog.at_level(logging.WARNING):
        room.empty(0)
    assert "8 slots stay lent" in caplog.text
    assert served.loans.page_slots == 2 * CHUNK
    card.decode(1)
    room.fill(PAGES)  # from what is lent already
    assert room.num_pages == PAGES
    monkeypatch.setattr(served.store, "take_back", usual)
    room.empty(0)
    assert card.offload.policy.capacity == SLOTS
    card.decode(1)
    card.check_slots()


def test_more_slots_are_lent_where_the_card_has_less_than_these_have_left(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card, room, loans, source = served.card, served.room, served.loans, served.source
    usual = loans.lend_to_pages

    def keep_a_chunk(num_slots: int) -> None:
        """The first chunk's memory stays with torch."""
        usual(num_slots)
        source.most_blocks = source.num_mapped + (loans.page_slots // CHUNK - 1) * served.chunk_bytes // BLOCK

    monkeypatch.setattr(loans, "lend_to_pages", keep_a_chunk)
    room.fill(served.first + 1)
    assert room.num_pages > served.first
    assert loans.page_slots == 2 * CHUNK
    assert "has less for pages than slots have left: 4 more are lent" in caplog.text
    card.decode(1)
    source.most_blocks = None
    room.empty(0)
    assert (loans.page_slots, card.offload.policy.capacity) == (0, SLOTS)
    card.prefill(100)
    card.check_slots()


def test_pages_without_room_say_so_and_go_on_later(served: Served) -> None:
    card, room = served.card, served.room
    served.source.most_blocks = served.source.num_mapped
    with pytest.raises(torch.OutOfMemoryError):
        room.fill(PAGES)
    assert room.num_pages == served.first
    assert served.told[-1] == room.num_bytes  # others may have the rest
    card.decode(1)
    card.prefill(100)  # all that a chunk may borrow is still there
    served.source.most_blocks = None
    room.fill(PAGES)
    assert room.num_pages == PAGES
    assert served.loans.page_slots == 2 * CHUNK


def test_slots_that_the_pages_do_not_have_cannot_be_taken(served: Served) -> None:
    with pytest.raises(ValueError, match="4 slots of the pages' 0"):
        served.loans.take_from_pages(CHUNK)
