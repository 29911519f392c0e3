"""Points a prefill layer's tables at all of its experts: staged or resident slot, else home."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm53srv.offload.device.gpu.launch import PlanOutputs


@triton.jit(do_not_specialize=["home"])
def point_layer(
    slots,
    slot_addresses,
    gate_table,
    up_table,
    down_table,
    scale_table,
    own_scales,
    home,
    num_experts,
    record_bytes: tl.constexpr,
    up_offset: tl.constexpr,
    down_offset: tl.constexpr,
    width: tl.constexpr,
):
    """See launch_point. width: experts of one program."""
    expert = tl.program_id(0) * width + tl.arange(0, width)
    inside = expert < num_experts
    slot = tl.load(slots + expert, mask=inside, other=-1)
    in_slot = tl.load(slot_addresses + slot, mask=slot >= 0, other=0)
    address = tl.where(slot >= 0, in_slot, home + expert.to(tl.int64) * record_bytes)
    tl.store(gate_table + expert, address, mask=inside)
    tl.store(up_table + expert, address + up_offset, mask=inside)
    tl.store(down_table + expert, address + down_offset, mask=inside)
    # A decode step may have left masked ones behind.
    tl.store(scale_table + expert, tl.load(own_scales + expert, mask=inside, other=0), mask=inside)


def launch_point(
    slots: torch.Tensor,
    slot_addresses: torch.Tensor,
    outputs: PlanOutputs,
    own_scales: torch.Tensor,
    home: int,
    layout: tuple[int, int, int],
) -> None:
    """Fill a layer's pointer tables whole, as a prefill needs: slot of each expert, or home for -1.

    slots: int32 (experts,), resident or staged. slot_addresses: int64 (num_slots,). own_scales: see
    PlanInputs. home: address of the layer's first record. layout: record bytes, and offsets of up and down in
    a record.
    """
    width = 128
    point_layer[(triton.cdiv(len(slots), width),)](
        slots,
        slot_addresses,
        outputs.gate_table,
        outputs.up_table,
        outputs.down_table,
        outputs.scale_table,
        own_scales,
        home,
        len(slots),
        record_bytes=layout[0],
        up_offset=layout[1],
        down_offset=layout[2],
        width=width,
    )
