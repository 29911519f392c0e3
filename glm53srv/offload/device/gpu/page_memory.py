"""The memory of a paged cache that exists for its first pages only: tensors whose addresses stay.

tensor 0   page 0 | page 1 | page 2 | (addresses without memory)            |
tensor 1   page 0 | page 1 | page 2 | (addresses without memory)            |
                                    ^ num_pages of all_pages

Kernels, captured ones too, see the whole tensor. Pages beyond must not be touched: a read there ends the
process's context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from glm53srv.offload.device.gpu.device_blocks import BlockSource


@dataclass(slots=True)
class _Window:
    """A tensor's addresses. page_bytes: of its part of a page; mapped_bytes: from the first address on."""

    address: int
    page_bytes: int
    reserved_bytes: int
    mapped_bytes: int
    bytes: torch.Tensor | None


class PageMemory:
    """Owns addresses and memory of a paged cache's tensors, pages [0, num_pages). Engine thread only.

    all_pages: for how many there are addresses. num_pages: how many have memory; read-only.
    """

    def __init__(self, source: BlockSource, all_pages: int, num_pages: int) -> None:
        if not 1 <= num_pages <= all_pages:
            raise ValueError(f"memory for {num_pages} of {all_pages} pages")
        self._source = source
        self._windows: list[_Window] = []
        self.all_pages, self.num_pages = all_pages, num_pages

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return sum(window.mapped_bytes for window in self._windows)

    def tensor(self, page_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor of the cache, (all_pages, *page_shape), zeroed where it has memory.

        Raises MachineError, torch.OutOfMemoryError.
        """
        page_bytes = math.prod(page_shape) * dtype.itemsize
        reserved = self._blocks(self.all_pages * page_bytes)
        window = _Window(self._source.reserve(reserved), page_bytes, reserved, 0, None)
        self._windows.append(window)
        self._extend(window, self.num_pages)
        window.bytes = self._source.view(window.address, self.all_pages * page_bytes)
        self._clear(window, 0)
        return window.bytes.view(dtype).view(self.all_pages, *page_shape)

    def bytes_for(self, num_pages: int) -> int:
        """Give the memory that so many pages take, in whole blocks of each tensor."""
        return sum(self._blocks(num_pages * window.page_bytes) for window in self._windows)

    def pages_within(self, num_bytes: int) -> int:
        """Give how many pages fit into so many bytes."""
        low, high = 0, self.all_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= num_bytes else (low, middle - 1)
        return low

    def resize(self, num_pages: int) -> None:
        """Have memory for pages [0, num_pages), blocks that come zeroed; the device must not use what leaves.

        Raises torch.OutOfMemoryError, and has changed nothing then.
        """
        if not 1 <= num_pages <= self.all_pages:
            raise ValueError(f"memory for {num_pages} of {self.all_pages} pages")
        before = [window.mapped_bytes for window in self._windows]
        try:
            for window in self._windows:
                self._extend(window, num_pages)
        except torch.OutOfMemoryError:
            for window, mapped in zip(self._windows, before, strict=True):
                self._cut(window, mapped)
            raise
        for window, mapped in zip(self._windows, before, strict=True):
            self._cut(window, self._blocks(num_pages * window.page_bytes))
            self._clear(window, mapped)
        self.num_pages = num_pages

    def close(self) -> None:
        """Give everything back; the device must be idle, and no tensor may be used again. Idempotent."""
        windows, self._windows = self._windows, []
        for window in windows:
            window.bytes = None
            self._cut(window, 0)
            self._source.release(window.address, window.reserved_bytes)

    def _blocks(self, num_bytes: int) -> int:
        size = self._source.block_bytes
        return -(-num_bytes // size) * size

    def _extend(self, window: _Window, num_pages: int) -> None:
        wanted = self._blocks(num_pages * window.page_bytes)
        if wanted > window.mapped_bytes:
            self._source.map(window.address + window.mapped_bytes, wanted - window.mapped_bytes)
            window.mapped_bytes = wanted

    def _cut(self, window: _Window, num_bytes: int) -> None:
        if num_bytes < window.mapped_bytes:
            self._source.unmap(window.address + num_bytes, window.mapped_bytes - num_bytes)
            window.mapped_bytes = num_bytes

    def _clear(self, window: _Window, begin: int) -> None:
        """Zero what was mapped beyond `begin`."""
        if window.bytes is not None and begin < window.mapped_bytes:
            window.bytes[begin : window.mapped_bytes].zero_()
