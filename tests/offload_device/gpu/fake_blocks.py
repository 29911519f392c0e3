"""Blocks of memory behind addresses that stay, where there is no GPU: pages of the host's."""

from __future__ import annotations

import ctypes
import mmap

import torch

BLOCK = 4096
DIRT = 0x5A
"""In memory that was just mapped."""


class FakeBlocks:
    """Notes which addresses have memory (a BlockSource). most_blocks: that there are; None: any number."""

    block_bytes = BLOCK

    def __init__(self) -> None:
        self.most_blocks: int | None = None
        self._ranges: dict[int, tuple[mmap.mmap, torch.Tensor]] = {}
        self._mapped: set[int] = set()

    @property
    def num_mapped(self) -> int:
        """Blocks that have memory."""
        return len(self._mapped)

    @property
    def num_reserved(self) -> int:
        """Ranges of addresses."""
        return len(self._ranges)

    def is_mapped(self, tensor: torch.Tensor) -> bool:
        """Tell whether all of a contiguous tensor has memory."""
        begin = tensor.data_ptr() // BLOCK * BLOCK
        return all(each in self._mapped for each in range(begin, tensor.data_ptr() + tensor.nbytes, BLOCK))

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % BLOCK == 0
        region = mmap.mmap(-1, num_bytes)
        tensor = torch.frombuffer(region, dtype=torch.uint8)
        address: int = tensor.data_ptr()
        self._ranges[address] = (region, tensor)
        return address

    def map(self, address: int, num_bytes: int) -> None:
        blocks = set(range(address, address + num_bytes, BLOCK))
        assert not blocks & self._mapped
        if self.most_blocks is not None and len(self._mapped) + len(blocks) > self.most_blocks:
            raise torch.OutOfMemoryError("no memory left")
        ctypes.memset(address, DIRT, num_bytes)
        self._mapped |= blocks

    def unmap(self, address: int, num_bytes: int) -> None:
        blocks = set(range(address, address + num_bytes, BLOCK))
        assert blocks <= self._mapped
        ctypes.memset(address, DIRT, num_bytes)
        self._mapped -= blocks

    def release(self, address: int, num_bytes: int) -> None:
        region, tensor = self._ranges.pop(address)
        assert len(region) == num_bytes
        assert not any(begin in self._mapped for begin in range(address, address + num_bytes, BLOCK))
        del tensor

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        assert address in self._mapped
        return self._ranges[address][1][:num_bytes]
