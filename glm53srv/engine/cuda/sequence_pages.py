"""Which pages hold tokens, of those that a sequence owns the first ones alone; and memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from glm53srv.engine.base import DecodeRow, EngineLimits


class Room(Protocol):
    """Gives pages memory and takes it back: a page_room.PageRoom."""

    @property
    def num_pages(self) -> int:
        """Pages that have memory: [0, num_pages)."""

    def fill(self, num_pages: int) -> None:
        """See to it that pages [0, num_pages) have memory. Raises torch.OutOfMemoryError."""

    def empty(self, num_pages: int) -> bool:
        """Give back what other pages have; tells whether that could be done now."""


class WholeRoom:
    """A cache all of whose pages have memory (a Room)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages

    def fill(self, num_pages: int) -> None:
        """Do nothing."""

    def empty(self, num_pages: int) -> bool:
        """Do nothing."""
        return True


@dataclass(frozen=True, slots=True)
class _Use:
    owned: Sequence[int]
    used: tuple[int, ...]
    reach: int


class SequencePages:
    """Knows of each engine slot how far its tokens reach. Engine thread only; before the step's kernels.

    A step asks for the same sequences again and again, so the answer is kept until a page is added.
    """

    def __init__(self, limits: EngineLimits, room: Room | None = None) -> None:
        """room: None where all pages have memory."""
        self._limits = limits
        self._room = room or WholeRoom(limits.num_pages)
        self._uses: dict[int, _Use] = {}
        self._held = 0
        self._may_empty = False  # a sequence ended, and its pages' memory was not given back yet

    @property
    def reach(self) -> int:
        """The highest page in use and 1, 0 for none."""
        return max([self._held, *(use.reach for use in self._uses.values())])

    def of_chunk(self, slot_id: int, page_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Give the pages of a slot's first num_tokens tokens, with memory, before a chunk borrows slots.

        Raises torch.OutOfMemoryError, EngineError.
        """
        pages = self._use(slot_id, page_ids, num_tokens)
        try:
            # Rows that decode beside the chunk may each begin a page: better now than beside it.
            self._room.fill(min(self.reach + self._limits.max_streams, self._limits.num_pages))
        except BaseException:
            self.release(slot_id)
            raise
        return pages

    def of_rows(self, rows: Sequence[DecodeRow]) -> list[tuple[int, ...]]:
        """Give the pages of each row's tokens, with memory.

        Raises torch.OutOfMemoryError, where rows that has_memory() denies may be released; EngineError.
        """
        pages = [self._use(row.slot, row.page_ids, row.position + 1) for row in rows]
        self._room.fill(self.reach)
        return pages

    def has_memory(self, slot_id: int) -> bool:
        """Tell whether all pages that a slot's tokens take have memory, behind an of_rows() that raised."""
        return self._uses[slot_id].reach <= self._room.num_pages

    def fill(self, num_pages: int) -> None:
        """Give pages [0, num_pages) memory before sequences run; shrink() may take it again."""
        self._room.fill(num_pages)
        self._may_empty = True

    def hold(self, num_pages: int) -> None:
        """Count pages [0, num_pages) as in use from now on, for measurements; 0: none beyond sequences'."""
        self._held = num_pages
        self.fill(num_pages)

    def release(self, slot_id: int) -> None:
        """Forget a slot; one that is not known is passed over."""
        self._uses.pop(slot_id, None)
        self._may_empty = True

    def shrink(self) -> None:
        """Give the memory back that no sequence reaches, if one has ended: between two steps."""
        if self._may_empty and self._room.empty(self.reach):
            self._may_empty = False

    def _use(self, slot_id: int, page_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        count = -(-num_tokens // self._limits.page_tokens)
        known = self._uses.get(slot_id)
        if known is None or known.owned is not page_ids or len(known.used) != count:
            used = tuple(page_ids[:count])
            known = self._uses[slot_id] = _Use(page_ids, used, max(used, default=-1) + 1)
        return known.used
