"""Puts the package's paged cache where its pages have memory one after the other."""

from __future__ import annotations

import logging
from typing import Any

import torch

from glm53srv.engine.cuda.model import PAGE_TOKENS
from glm53srv.errors import MachineError
from glm53srv.offload.device.gpu.device_blocks import BlockSource, DriverBlocks, open_driver
from glm53srv.offload.device.gpu.page_memory import PageMemory

logger = logging.getLogger(__name__)


def find_blocks(device: torch.device) -> DriverBlocks | None:
    """Open the driver's memory under fixed addresses; None, and a line in the log, where it has none."""
    try:
        source = DriverBlocks(device, open_driver())
        source.try_out()
        return source
    except (MachineError, torch.OutOfMemoryError) as error:
        logger.warning("the KV cache has all its memory from the start: %s", error)
        return None


def hold_pages(cache: Any, source: BlockSource, num_pages: int, first_pages: int) -> PageMemory:
    """Let a loaded cache of one page have num_pages, with memory for the first of them.

    The package makes it of one page, since what torch had for more would leave holes between the weights.
    Raises MachineError, torch.OutOfMemoryError.
    """
    pages = PageMemory(source, num_pages, min(first_pages, num_pages))
    for layer in cache.layers.values():
        own = {id(tensor) for tensor in layer.get_tensors() if tensor.numel()}
        for name, tensor in list(vars(layer).items()):
            if id(tensor) in own:
                setattr(layer, name, pages.tensor(tuple(tensor.shape[1:]), tensor.dtype))
        layer.max_num_tokens = num_pages * PAGE_TOKENS
    cache.max_num_tokens = num_pages * PAGE_TOKENS
    return pages


def limit_torch(vram_bytes: int | None, device: torch.device, page_bytes: int) -> None:
    """Hold torch's allocator to what the pages leave of the process's share, None for no limit."""
    if vram_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0, vram_bytes - page_bytes) / total, device)
