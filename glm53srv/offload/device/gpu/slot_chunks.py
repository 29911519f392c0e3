"""The memory of cache slots: chunks of slots, each an allocation of its own, so that lending gives it back.

slots   0 .. c-1   c .. 2c-1   ...   the last chunk may be shorter
chunk      0           1       ...   a lent chunk has no memory
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray


class SlotChunks:
    """Owns the allocations. Knows no streams: the caller sees to it that nobody uses what is freed.

    chunk_slots: slots of a chunk, read-only.
    """

    def __init__(self, num_slots: int, chunk_slots: int, record_bytes: int, device: torch.device) -> None:
        """Allocate all. Raises torch.OutOfMemoryError."""
        self._num_slots = num_slots
        self.chunk_slots = chunk_slots
        self._record_bytes = record_bytes
        self._device = device
        self._chunks: list[torch.Tensor | None] = [None] * -(-num_slots // chunk_slots)
        self._allocate(range(len(self._chunks)))

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return sum(chunk.nbytes for chunk in self._chunks if chunk is not None)

    def has_memory(self, slot: int) -> bool:
        """Tell whether a slot is not lent."""
        return self._chunks[slot // self.chunk_slots] is not None

    def slot(self, slot: int) -> torch.Tensor:
        """View a slot, uint8 (record_bytes,). Raises RuntimeError for one that is lent."""
        return self.slots(slot, 1)[0]

    def slots(self, slot: int, count: int) -> torch.Tensor:
        """View neighbours of one chunk, from a slot on: uint8 (count, record_bytes). Raises RuntimeError."""
        chunk = self._chunks[slot // self.chunk_slots]
        if chunk is None:
            raise RuntimeError(f"slot {slot} has no memory: it is lent")
        begin = slot % self.chunk_slots
        return chunk[begin : begin + count]

    def addresses(self) -> NDArray[np.int64]:
        """Give each slot's address, int64 (num_slots,), 0 for one that is lent."""
        addresses = np.zeros(self._num_slots, np.int64)
        for index, chunk in enumerate(self._chunks):
            if chunk is not None:
                begin = index * self.chunk_slots
                places = np.arange(len(chunk), dtype=np.int64)
                addresses[begin : begin + len(chunk)] = chunk.data_ptr() + places * self._record_bytes
        return addresses

    def free(self, slots: range) -> bool:
        """Free the chunks that lie wholly among these slots; tells whether one of them had memory."""
        chunks = self._whole_chunks(slots)
        had_memory = any(self._chunks[chunk] is not None for chunk in chunks)
        for chunk in chunks:
            self._chunks[chunk] = None
        return had_memory

    def allocate(self, slots: range) -> None:
        """Allocate again what free() freed of them. Raises torch.OutOfMemoryError, having allocated none."""
        missing = [chunk for chunk in self._whole_chunks(slots) if self._chunks[chunk] is None]
        try:
            self._allocate(missing)
        except torch.OutOfMemoryError:
            for chunk in missing:
                self._chunks[chunk] = None
            raise

    def free_all(self) -> None:
        """Free everything."""
        self._chunks = [None] * len(self._chunks)

    def _whole_chunks(self, slots: range) -> range:
        last = len(self._chunks) if slots.stop >= self._num_slots else slots.stop // self.chunk_slots
        return range(-(-slots.start // self.chunk_slots), last)

    def _allocate(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            count = min(self.chunk_slots, self._num_slots - chunk * self.chunk_slots)
            shape = (count, self._record_bytes)
            self._chunks[chunk] = torch.empty(shape, dtype=torch.uint8, device=self._device)
