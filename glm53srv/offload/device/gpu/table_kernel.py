"""Changes the residency table between two steps, in stream order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm53srv.offload import offers

BLOCK = 128
ABSENT, BARRED = tl.constexpr(offers.ABSENT), tl.constexpr(offers.BARRED)


@triton.jit(do_not_specialize=["num_unmap", "num_bar", "num_map"])
def apply_update(
    table, unmap_keys, bar_keys, map_keys, map_slots, num_unmap, num_bar, num_map, block: tl.constexpr
):
    """Clear entries, bar entries, then set entries; one program, so that the order is certain."""
    for begin in range(0, num_unmap, block):
        index = begin + tl.arange(0, block)
        inside = index < num_unmap
        key = tl.load(unmap_keys + index, mask=inside, other=0)
        tl.store(table + key, ABSENT, mask=inside)
    tl.debug_barrier()
    for begin in range(0, num_bar, block):
        index = begin + tl.arange(0, block)
        inside = index < num_bar
        key = tl.load(bar_keys + index, mask=inside, other=0)
        # What the running step has just kept stays: the host learns it from the log.
        entry = tl.load(table + key, mask=inside, other=0)
        tl.store(table + key, BARRED, mask=inside & (entry == ABSENT))
    tl.debug_barrier()
    for begin in range(0, num_map, block):
        index = begin + tl.arange(0, block)
        inside = index < num_map
        key = tl.load(map_keys + index, mask=inside, other=0)
        tl.store(table + key, tl.load(map_slots + index, mask=inside, other=0), mask=inside)


def launch_update(
    table: torch.Tensor,
    unmap_keys: torch.Tensor,
    bar_keys: torch.Tensor,
    map_keys: torch.Tensor,
    map_slots: torch.Tensor,
) -> None:
    """Apply residency.ResidencyUpdate's table part to table, int32 (layers, experts), on the device.

    unmap_keys, bar_keys, map_keys, map_slots: int32, on the device or in mapped memory; map_* of one length.
    """
    if len(map_keys) != len(map_slots):
        raise ValueError(f"{len(map_keys)} keys for {len(map_slots)} slots")
    apply_update[(1,)](
        table,
        unmap_keys,
        bar_keys,
        map_keys,
        map_slots,
        len(unmap_keys),
        len(bar_keys),
        len(map_keys),
        block=BLOCK,
    )
