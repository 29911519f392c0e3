"""Changes the residency table between two steps, in stream order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit(do_not_specialize=["num_unmap", "num_map"])
def apply_update(table, unmap_keys, map_keys, map_slots, num_unmap, num_map, block: tl.constexpr):
    """Clear entries, then set entries; one program, so that the order is certain."""
    for begin in range(0, num_unmap, block):
        index = begin + tl.arange(0, block)
        inside = index < num_unmap
        key = tl.load(unmap_keys + index, mask=inside, other=0)
        tl.store(table + key, -1, mask=inside)
    tl.debug_barrier()
    for begin in range(0, num_map, block):
        index = begin + tl.arange(0, block)
        inside = index < num_map
        key = tl.load(map_keys + index, mask=inside, other=0)
        tl.store(table + key, tl.load(map_slots + index, mask=inside, other=0), mask=inside)


def launch_update(
    table: torch.Tensor, unmap_keys: torch.Tensor, map_keys: torch.Tensor, map_slots: torch.Tensor
) -> None:
    """Apply residency.ResidencyUpdate's table part to table, int32 (layers, experts), on the device.

    unmap_keys, map_keys, map_slots: int32, on the device or in mapped memory; map_* of one length.
    """
    if len(map_keys) != len(map_slots):
        raise ValueError(f"{len(map_keys)} keys for {len(map_slots)} slots")
    apply_update[(1,)](table, unmap_keys, map_keys, map_slots, len(unmap_keys), len(map_keys), block=BLOCK)
