"""What the launchers take: tensors by name, with shape, type and owner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm53srv.offload.device.layout import BLOCK, Part, RecordLayout

TILE = 16
"""Rows and columns of a tile of packed weights (docs of the EXL3 format)."""
WORD_BYTES = 8
UNIT_BYTES = 128
"""A block has eight tiles of a tile row, of a multiple of 16 bytes each: a record is made of such units."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a layer's plan reads; all on the device, contiguous, borrowed for the launch.

    picks: int64 (rows, top_k), the router's, -1 for none. weights: float16 (rows, top_k), changed in place.
    x: float16 (rows, hidden), the experts' input. slots, heat: int32 (experts,), the layer's rows of the
    residency and heat tables. cpu_count: int32 (side, side), see cost.cpu_count_table; in parts, of which an
    expert has num_parts of part_blocks 128-blocks each. own_scales: int64 (experts,), addresses of down's
    input scales. slot_addresses: int64 (num_slots,), the device address of each slot. offers: int32
    (offers.NUM_WORDS,), offer_head: int32 (1,): what may be kept, see offers.py; slots and offer_head are
    changed. home: device address of the layer's first record. layer: counted over sparse layers.
    """

    picks: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    slots: torch.Tensor
    heat: torch.Tensor
    cpu_count: torch.Tensor
    own_scales: torch.Tensor
    slot_addresses: torch.Tensor
    offers: torch.Tensor
    offer_head: torch.Tensor
    home: int
    layer: int
    record_bytes: int
    up_offset: int
    down_offset: int
    num_parts: int
    part_blocks: int


COUNT_WORDS = 8
"""Words of a layer's counts: experts in VRAM, over the link, on the CPU; then the low words of three times of
the device in ns: when the plan was about to post its job, when the GPU's lane was done, when the CPU's answer
was there; and 128-blocks of the shared expert on the CPU. Without workers, or under Triton's interpreter,
which has no clock, the times stay 0. A word more, so that each layer's begin at a multiple of 16 bytes: for
other places Triton compiles a kernel anew, and none that is new may be met in a capture."""
TOLD_WORDS = 4
"""Words of what a plan tells of guesses: experts that were fetched ahead of the layer, and how many of them
it picked; likewise with two words more."""


@dataclass(frozen=True, slots=True)
class PlanOutputs:
    """What it writes. gate_table, up_table, down_table: int64 (experts,), the pointer tables of the trellis;
    scale_table: likewise, of down's input scales.

    log_picks: int32 (rows * top_k,), log_lanes: int8 likewise: the layer's part of the routing log, which
    may lie in mapped memory. log_kept: int32 likewise, the slots that were taken, else -1. counts: int32
    (COUNT_WORDS,).
    """

    gate_table: torch.Tensor
    up_table: torch.Tensor
    down_table: torch.Tensor
    scale_table: torch.Tensor
    log_picks: torch.Tensor
    log_lanes: torch.Tensor
    log_kept: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Landing:
    """Where experts that come over the link are put before they are computed; all of it on the device.

    address: of the first of num_experts buffers of a record each; every layer uses the same. sources,
    targets: int64 (num_experts,), count: int32 (1,): the copies that a layer's plan wants, and how many.
    skips: int32 (num_experts,), 128-blocks of the intermediate that a copy leaves out, from the first on.
    scales: float16 (intermediate,), masked ones of the shared expert; mask: int64 (2,): the address of its
    own scales, or 0, and how many blocks of them are to be 0.
    """

    address: int
    num_experts: int
    sources: torch.Tensor
    targets: torch.Tensor
    count: torch.Tensor
    skips: torch.Tensor
    scales: torch.Tensor
    mask: torch.Tensor


def make_landing(buffers: torch.Tensor, intermediate: int = 1) -> Landing:
    """Describe buffers, uint8 (num_experts, record bytes) on the device; the caller keeps them.

    intermediate: width of the experts, for plans that share them with the CPU.
    """
    num_experts, device = len(buffers), buffers.device
    sources, targets = torch.zeros((2, max(1, num_experts)), dtype=torch.int64, device=device)
    return Landing(
        int(buffers.data_ptr()),
        num_experts,
        sources,
        targets,
        count=torch.zeros(1, dtype=torch.int32, device=device),
        skips=torch.zeros(max(1, num_experts), dtype=torch.int32, device=device),
        scales=torch.zeros(intermediate, dtype=torch.float16, device=device),
        mask=torch.zeros(2, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True)
class RecordCut:
    """How the gather kernel finds the blocks of the intermediate in a record, in units of UNIT_BYTES.

    gate_row, up_row: of one tile row of the matrix, of which a block is gate_block, up_block. up_begin,
    down_begin: where these matrices begin. down_block: of one block's tile rows.
    """

    gate_row: int
    gate_block: int
    up_begin: int
    up_row: int
    up_block: int
    down_begin: int
    down_block: int


def cut_of(layout: RecordLayout) -> RecordCut:
    """Describe a record."""
    # A tile has 2 bytes a word; a block's tiles of one tile row are 128 / 16.
    gate, up, down = (2 * words * (BLOCK // TILE) // UNIT_BYTES for words in layout.words)
    return RecordCut(
        gate_row=layout.num_blocks * gate,
        gate_block=gate,
        up_begin=layout.offset(Part.UP) // UNIT_BYTES,
        up_row=layout.num_blocks * up,
        up_block=up,
        down_begin=layout.offset(Part.DOWN) // UNIT_BYTES,
        down_block=layout.hidden // BLOCK * down * (BLOCK // TILE),
    )


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
