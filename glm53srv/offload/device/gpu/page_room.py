"""Memory for the KV cache as it fills, from the expert cache, and back as it empties."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from glm53srv.offload.device.gpu.page_memory import PageMemory
from glm53srv.offload.device.gpu.slot_loans import SlotLoans
from glm53srv.offload.vram_plan import VramPlan

logger = logging.getLogger(__name__)


class PageRoom:
    """Moves memory between pages and slots, in chunks of slots. Engine thread only, between steps.

    Pages get what lent chunks hold beside what was theirs from the start; a page that has memory keeps it
    until `empty`. Half a chunk beyond what is used stays theirs then, so that requests of one size that come
    and go move nothing; when nothing is used they have what was theirs.
    """

    def __init__(
        self,
        memory: PageMemory,
        loans: SlotLoans,
        plan: VramPlan,
        expert_bytes: int,
        limit_others: Callable[[int], None] = lambda page_bytes: None,
    ) -> None:
        """Give the pages what is theirs from the start.

        limit_others: told the pages' bytes before they take memory and when they have given some up, for a
        limit that is shared with torch. Raises torch.OutOfMemoryError.
        """
        self._memory, self._loans = memory, loans
        self._chunk_slots = plan.chunk_slots
        self._chunk_bytes = plan.chunk_slots * expert_bytes
        self._limit_others = limit_others
        all_bytes = memory.bytes_for(memory.all_pages)
        self._most_chunks = plan.page_slots // plan.chunk_slots
        self._own_bytes = all_bytes - self._most_chunks * self._chunk_bytes
        pages_of_chunk = self._chunk_bytes * memory.all_pages // max(1, all_bytes)
        self._spare_pages = min(pages_of_chunk // 2, memory.pages_within(self._own_bytes))
        self._resize(0)

    @property
    def num_pages(self) -> int:
        """Pages that have memory."""
        return self._memory.num_pages

    @property
    def num_bytes(self) -> int:
        """Their memory."""
        return self._memory.num_bytes

    def fill(self, num_pages: int) -> None:
        """See to it that pages [0, num_pages) have memory, also beside a prefill chunk.

        Where the driver gets less back than slots have left, since torch keeps what shares an allocation or
        another process was faster, more slots are lent. Raises torch.OutOfMemoryError when none can be,
        EngineError.
        """
        if num_pages <= self._memory.num_pages:
            return
        wanted = self._chunks_for(num_pages)
        missing = wanted - self._loans.page_slots // self._chunk_slots
        if missing > 0:
            self._loans.lend_to_pages(missing * self._chunk_slots)
        while not self._could_resize(wanted):
            logger.warning(
                "the card has less for pages than slots have left: %d more are lent", self._chunk_slots
            )
            self._loans.lend_to_pages(self._chunk_slots)
        logger.debug("pages=%d of=%d lent_slots=%d", self.num_pages, num_pages, self._loans.page_slots)

    def empty(self, num_pages: int) -> bool:
        """Give back what pages [0, num_pages) do not need, and half a chunk more.

        Tells whether it could be looked at: not while a prefill chunk borrows slots.
        """
        if self._loans.has_chunk:
            return False
        lent = self._loans.page_slots // self._chunk_slots
        wanted = self._chunks_for(min(num_pages + self._spare_pages, self._memory.all_pages))
        if wanted < lent:
            torch.cuda.synchronize()  # steps that used the pages may still run
            self._resize(wanted)
            self._loans.take_from_pages((lent - wanted) * self._chunk_slots)
        return True

    def close(self) -> None:
        """Free the pages; the device must be idle, and their tensors are used no more. Idempotent."""
        self._memory.close()

    def _chunks_for(self, num_pages: int) -> int:
        missing = self._memory.bytes_for(num_pages) - self._own_bytes
        return min(max(0, -(-missing // self._chunk_bytes)), self._most_chunks)

    def _could_resize(self, num_chunks: int) -> bool:
        """Resize, or tell that it could not be done but may be with a chunk more."""
        try:
            self._resize(num_chunks)
        except torch.OutOfMemoryError:
            if not self._loans.can_lend(self._chunk_slots):
                raise
            return False
        return True

    def _resize(self, num_chunks: int) -> None:
        num_bytes = self._own_bytes + num_chunks * self._chunk_bytes
        pages = max(1, self._memory.pages_within(num_bytes))
        if pages > self._memory.num_pages:
            self._limit_others(self._memory.bytes_for(pages))
        try:
            self._memory.resize(pages)
        finally:
            self._limit_others(self._memory.num_bytes)
