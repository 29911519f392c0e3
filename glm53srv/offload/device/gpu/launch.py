"""What the launchers take: tensors by name, with shape, type and owner."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a layer's plan reads; all on the device, contiguous, borrowed for the launch.

    picks: int64 (rows, top_k), the router's, -1 for none. weights: float16 (rows, top_k), changed in place.
    x: float16 (rows, hidden), the experts' input. slots, heat: int32 (experts,), the layer's rows of the
    residency and heat tables. cpu_count: int32 (side, side), see cost.cpu_count_table. slot_addresses: int64
    (num_slots,), the device address of each slot. offers: int32 (offers.NUM_WORDS,), offer_head: int32 (1,):
    what may be kept, see offers.py; slots and offer_head are changed. home: device address of the layer's
    first record. layer: counted over sparse layers.
    """

    picks: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    slots: torch.Tensor
    heat: torch.Tensor
    cpu_count: torch.Tensor
    slot_addresses: torch.Tensor
    offers: torch.Tensor
    offer_head: torch.Tensor
    home: int
    layer: int
    record_bytes: int
    up_offset: int
    down_offset: int


COUNT_WORDS = 8
"""Words of a layer's counts: experts in VRAM, over the link, on the CPU; then the low words of three times of
the device in ns: when the plan was about to post its job, when the GPU's lane was done, when the CPU's answer
was there. Without workers, or under Triton's interpreter, which has no clock, they stay 0. Two words more, so
that each layer's begin at a multiple of 16 bytes: for other places Triton compiles a kernel anew, and none
that is new may be met in a capture."""
TOLD_WORDS = 4
"""Words of what a plan tells of guesses: experts that were fetched ahead of the layer, and how many of them
it picked; likewise with two words more."""


@dataclass(frozen=True, slots=True)
class PlanOutputs:
    """What it writes. gate_table, up_table, down_table: int64 (experts,), the pointer tables of the trellis.

    log_picks: int32 (rows * top_k,), log_lanes: int8 likewise: the layer's part of the routing log, which
    may lie in mapped memory. log_kept: int32 likewise, the slots that were taken, else -1. counts: int32
    (COUNT_WORDS,).
    """

    gate_table: torch.Tensor
    up_table: torch.Tensor
    down_table: torch.Tensor
    log_picks: torch.Tensor
    log_lanes: torch.Tensor
    log_kept: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Landing:
    """Where experts that come over the link are put before they are computed; all of it on the device.

    address: of the first of num_experts buffers of a record each; every layer uses the same. sources,
    targets: int64 (num_experts,), count: int32 (1,): the copies that a layer's plan wants, and how many.
    """

    address: int
    num_experts: int
    sources: torch.Tensor
    targets: torch.Tensor
    count: torch.Tensor


def make_landing(buffers: torch.Tensor) -> Landing:
    """Describe buffers, uint8 (num_experts, record bytes) on the device; the caller keeps them."""
    num_experts = len(buffers)
    sources, targets = torch.zeros((2, max(1, num_experts)), dtype=torch.int64, device=buffers.device)
    count = torch.zeros(1, dtype=torch.int32, device=buffers.device)
    return Landing(int(buffers.data_ptr()), num_experts, sources, targets, count)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was fetched ahead for a layer (offload/look_ahead.py), as its plan sees it; all on the device.

    experts: int64 (MAX_AHEAD,), of which the first fetches.count are there: number i lies in buffer i of
    fetches. keeps: the copies into slots that the plan wants of them. told: int32 (TOLD_WORDS,), written by
    the plan.
    """

    experts: torch.Tensor
    fetches: Landing
    keeps: Landing
    told: torch.Tensor


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """A layer's router as guesses use it. gate: floats (hidden, experts), any strides. bias: float32
    (experts,), added to the sigmoid for the choice."""

    gate: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class MailRing:
    """The mailbox as kernels see it. address: of its first cell, on the device; num_cells: a power of two.

    first_seq: int32 (1,), number of the step's first job, on the device: a kernel that was captured into a
    graph reads it anew at each replay. fence: int32 (1,), 0, on the device.
    """

    address: int
    num_cells: int
    cell_bytes: int
    weights_offset: int
    x_offset: int
    y_offset: int
    first_seq: torch.Tensor
    fence: torch.Tensor


def int32_bits(number: int) -> int:
    """Give the signed integer with the bits of an unsigned 32-bit one: what a kernel's int32 takes."""
    number &= 0xFFFFFFFF
    return number - 2**32 if number >= 2**31 else number


def power_of_two(count: int) -> int:
    """Give the least power of two that is not below count."""
    return 1 << max(0, count - 1).bit_length()
