"""Plans one layer of a decode step on the GPU, with no word to the host: dedup, lookup, split, log, mailbox.

The rule is glm53srv/offload/split.py, integer for integer; the mailbox is the one described in
native/include/glm53_kernels.h, byte for byte. One program does it all: 4 rows of top 8 are 32 picks, and the
sums over all pairs of them are smaller than a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm53srv.offload import look_ahead
from glm53srv.offload import offers as offers_rule
from glm53srv.offload.device.gpu.launch import (
    Ahead,
    Landing,
    MailRing,
    PlanInputs,
    PlanOutputs,
    power_of_two,
)

LANE_VRAM = tl.constexpr(1)
LANE_LINK = tl.constexpr(2)
LANE_CPU = tl.constexpr(3)
LANE_SPLIT = tl.constexpr(4)
"""Values of split.Lane."""

POSTED_WORD, LAYER_WORD, ROWS_WORD = tl.constexpr(0), tl.constexpr(32), tl.constexpr(33)
NUM_PICKS_WORD, X_KIND_WORD, PICKS_WORD = tl.constexpr(34), tl.constexpr(35), tl.constexpr(64)
PART_EXPERT_WORD, PART_BLOCKS_WORD = tl.constexpr(36), tl.constexpr(37)
X_F16 = tl.constexpr(1)
"""Places in a mailbox cell, in words of 4 bytes."""

THRESHOLD_WORD, FIRST_WORD, TAIL_WORD, RING_WORD = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
)
RING_SLOTS = tl.constexpr(offers_rule.RING_SLOTS)
ABSENT = tl.constexpr(offers_rule.ABSENT)
"""Places in the words of offers.Offers, and values of that rule."""

MAX_AHEAD = tl.constexpr(look_ahead.MAX_AHEAD)
"""Experts that may be fetched ahead, a power of two."""

COPY_ITEMS = tl.constexpr(2048)


@triton.jit(
    do_not_specialize=[
        "home",
        "ring",
        "landing",
        "num_landing",
        "masked_scales",
        "layer",
        "num_picks",
        "rows",
        "side",
        "ahead_buffer",
    ]
)
def plan_layer(
    picks,
    weights,
    hit_weights,
    x,
    slots,
    heat,
    cpu_count,
    slot_addresses,
    gate_table,
    up_table,
    down_table,
    scale_table,
    own_scales,
    log_picks,
    log_lanes,
    counts,
    gather_sources,
    gather_targets,
    gather_count,
    gather_skips,
    gather_mask,
    offers,
    offer_head,
    log_kept,
    first_seq,
    fence,
    ahead_experts,
    ahead_count,
    keep_sources,
    keep_targets,
    keep_count,
    ahead_told,
    home,
    landing,
    num_landing,
    masked_scales,
    ring,
    layer,
    rows,
    num_picks,
    side,
    ahead_buffer,
    record_bytes: tl.constexpr,
    up_offset: tl.constexpr,
    down_offset: tl.constexpr,
    weights_offset: tl.constexpr,
    x_offset: tl.constexpr,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    width: tl.constexpr,
    num_cells: tl.constexpr,
    cell_bytes: tl.constexpr,
    has_cpu: tl.constexpr,
    num_parts: tl.constexpr,
    part_blocks: tl.constexpr,
    has_ahead: tl.constexpr,
    has_hits: tl.constexpr,
    has_clock: tl.constexpr,
):
    """See launch_plan for the arguments. width: power of two >= num_picks = rows * top_k."""
    place = tl.arange(0, width)
    in_range = place < num_picks
    expert = tl.load(picks + place, mask=in_range, other=-1).to(tl.int32)
    present = expert >= 0
    same = (expert[:, None] == expert[None, :]) & present[None, :]
    first = tl.min(tl.where(same, place[None, :], width), axis=1)
    first = tl.where(present, first, place)
    standing = present & (first == place)
    known = tl.where(present, expert, 0)
    slot = tl.load(slots + known, mask=present, other=-1)
    is_hit = standing & (slot >= 0)
    is_miss = standing & (slot < 0)
    num_hits = tl.sum(is_hit.to(tl.int32), axis=0)
    num_ahead = 0
    if has_ahead:
        # What was fetched ahead will be there when the experts begin: no miss to be shared out.
        number = tl.arange(0, MAX_AHEAD)
        num_fetched = tl.load(ahead_count)
        fetched = tl.load(ahead_experts + number, mask=number < num_fetched, other=-1).to(tl.int32)
        is_fetched = (known[:, None] == fetched[None, :]) & is_miss[:, None]
        is_ahead = tl.sum(is_fetched.to(tl.int32), axis=1) > 0
        in_buffer = tl.sum(tl.where(is_fetched, number[None, :], 0), axis=1)
        in_buffer = ahead_buffer + in_buffer.to(tl.int64) * record_bytes
        is_miss = standing & (slot < 0) & (is_ahead == 0)
        num_ahead = tl.sum(is_ahead.to(tl.int32), axis=0)
        tl.store(ahead_told, num_fetched)
        tl.store(ahead_told + 1, num_ahead)
    num_misses = tl.sum(is_miss.to(tl.int32), axis=0)
    cpu_parts = tl.load(cpu_count + (num_hits + num_ahead) * side + num_misses)
    num_cpu = cpu_parts // num_parts

    # One sortable number per pick: heat above, expert below, as in the rule.
    warmth = tl.load(heat + known, mask=present, other=0)
    order = (warmth.to(tl.int64) << 20) | known.to(tl.int64)
    is_colder = is_miss[None, :] & (order[None, :] < order[:, None])
    rank = tl.sum(is_colder.to(tl.int32), axis=1)
    lane = tl.where(is_miss, tl.where(rank < num_cpu, LANE_CPU, LANE_LINK), 0)
    is_split = is_miss & (rank == num_cpu) & (cpu_parts % num_parts > 0)
    lane = tl.where(is_split, LANE_SPLIT, lane)
    lane = tl.where(is_hit, LANE_VRAM, lane)
    if has_ahead:
        lane = tl.where(is_ahead, LANE_LINK, lane)
    blocks = tl.where(is_split, cpu_parts % num_parts * part_blocks, 0)  # of the intermediate, on the CPU
    cpu_blocks = tl.sum(blocks, axis=0)
    lanes = tl.sum(tl.where(first[:, None] == place[None, :], lane[None, :], 0), axis=1)
    lanes = tl.where(present, lanes, 0)

    tl.store(log_picks + place, tl.where(present, expert, -1), mask=in_range)
    tl.store(log_lanes + place, lanes.to(tl.int8), mask=in_range)
    tl.store(counts, num_hits)
    tl.store(counts + 1, num_misses - num_cpu + num_ahead)
    tl.store(counts + 2, num_cpu)
    tl.store(counts + 6, cpu_blocks)

    # What comes over the link lands in a buffer while there is one, and is read in place beyond that.
    is_link = is_miss & ((lane == LANE_LINK) | is_split)
    is_before = is_link[None, :] & (place[None, :] < place[:, None])
    buffer = tl.sum(is_before.to(tl.int32), axis=1)
    lands = is_link & (buffer < num_landing)
    at_home = home + known.to(tl.int64) * record_bytes

    # What is worth a slot of the cache lands in one that the host has offered, and stays: offers.py.
    head = tl.load(offer_head)
    first_offer = tl.load(offers + FIRST_WORD)
    head = tl.where(first_offer - head > 0, first_offer, head)
    is_wanted = lands
    if has_ahead:
        is_wanted = lands | is_ahead
    is_wanted = (
        is_wanted & (lane == LANE_LINK) & (slot == ABSENT) & (warmth >= tl.load(offers + THRESHOLD_WORD))
    )
    is_before = is_wanted[None, :] & (place[None, :] < place[:, None])
    ordinal = tl.sum(is_before.to(tl.int32), axis=1)
    takes = is_wanted & (ordinal < tl.load(offers + TAIL_WORD) - head)
    kept = tl.load(offers + RING_WORD + ((head + ordinal) & (RING_SLOTS - 1)), mask=takes, other=-1)
    head += tl.sum(takes.to(tl.int32), axis=0)
    weight = tl.load(weights + place, mask=in_range, other=0.0)
    # Every warp has its own copy of what was loaded: none may change it before all have read it.
    tl.debug_barrier()
    tl.store(offer_head, head)
    tl.store(slots + known, kept, mask=takes)
    tl.store(log_kept + place, kept, mask=in_range)

    in_slot = tl.load(slot_addresses + tl.where(takes, kept, slot), mask=is_hit | takes, other=0)
    landed = tl.where(takes, in_slot, landing + buffer.to(tl.int64) * record_bytes)
    tl.store(gather_sources + buffer, at_home, mask=lands)
    tl.store(gather_targets + buffer, landed, mask=lands)
    tl.store(gather_count, tl.sum(lands.to(tl.int32), axis=0))

    address = tl.where(is_hit, in_slot, tl.where(lands, landed, at_home))
    if has_ahead:
        # Computed from its buffer in any case; the copy into a slot is for the steps to come.
        address = tl.where(is_ahead, in_buffer, address)
        stays = is_ahead & takes
        is_before = stays[None, :] & (place[None, :] < place[:, None])
        copy = tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(keep_sources + copy, in_buffer, mask=stays)
        tl.store(keep_targets + copy, in_slot, mask=stays)
        tl.store(keep_count, tl.sum(stays.to(tl.int32), axis=0))
    tl.store(gate_table + known, address, mask=standing)
    tl.store(up_table + known, address + up_offset, mask=standing)
    tl.store(down_table + known, address + down_offset, mask=standing)
    if has_cpu:
        # The buffer of a shared expert holds anything where the CPU's neurons would be: down's scales say 0.
        own = tl.load(own_scales + known, mask=standing, other=0)
        tl.store(scale_table + known, tl.where(is_split, masked_scales, own), mask=standing)
        tl.store(gather_skips + buffer, blocks, mask=lands)
        tl.store(gather_mask, tl.sum(tl.where(is_split, own, 0), axis=0))
        tl.store(gather_mask + 1, cpu_blocks.to(tl.int64))

    is_cpu = lanes == LANE_CPU
    is_elsewhere = is_cpu
    if has_hits:
        # Those in VRAM are computed by a launch of their own, beside the copies of the others.
        is_elsewhere = is_cpu | (lanes == LANE_VRAM)
        tl.store(hit_weights + place, tl.where(lanes == LANE_VRAM, weight, 0.0), mask=in_range)
    tl.store(weights + place, tl.where(is_elsewhere, 0.0, weight), mask=in_range)
    if has_cpu:
        seq = tl.load(first_seq) + layer
        cell = ring + (seq & (num_cells - 1)).to(tl.int64) * cell_bytes
        words = cell.to(tl.pointer_type(tl.int32))
        factors = (cell + weights_offset).to(tl.pointer_type(tl.float32))
        is_posted = is_cpu | (lanes == LANE_SPLIT)
        tl.store(words + PICKS_WORD + place, tl.where(is_posted, expert, -1), mask=in_range)
        tl.store(factors + place, weight.to(tl.float32), mask=in_range)
        tl.store(words + LAYER_WORD, layer)
        tl.store(words + ROWS_WORD, tl.where(num_cpu + cpu_blocks > 0, rows, 0))
        tl.store(words + NUM_PICKS_WORD, top_k)
        tl.store(words + X_KIND_WORD, X_F16)
        tl.store(words + PART_EXPERT_WORD, tl.sum(tl.where(is_split, known, 0), axis=0))
        tl.store(words + PART_BLOCKS_WORD, cpu_blocks)
        if num_cpu + cpu_blocks > 0:
            # Cells and their parts begin at multiples of 64 bytes; told so, a thread stores 16 bytes at once.
            target = tl.multiple_of((cell + x_offset).to(tl.pointer_type(tl.float16)), 64)
            for begin in range(0, rows * hidden, COPY_ITEMS):
                item = begin + tl.arange(0, COPY_ITEMS)
                inside = item < rows * hidden
                tl.store(target + item, tl.load(x + item, mask=inside), mask=inside)
        if has_clock:
            tl.store(counts + 3, tl.extra.cuda.globaltimer().to(tl.int32))
        # All threads have written before one of them publishes. Its exchange is with the card's own memory,
        # for the fence alone: not every link carries atomics, and a plain store behind a fence needs none.
        tl.debug_barrier()
        zero = tl.atomic_add(fence, 0, sem="acq_rel", scope="sys")
        tl.store(words + POSTED_WORD, seq + zero)


def launch_plan(
    inputs: PlanInputs,
    outputs: PlanOutputs,
    landing: Landing,
    ring: MailRing | None,
    ahead: Ahead | None = None,
    hit_weights: torch.Tensor | None = None,
) -> None:
    """Plan a layer on the current stream.

    inputs.weights is changed in place: 0 for what the CPU computes, which the expert kernels then skip. With
    hit_weights, float16 (rows, top_k), the weights of experts in VRAM are written there, 0 for others, and
    are 0 in inputs.weights: two launches of the expert kernels then compute what one did.
    The expert that is shared with the CPU keeps its weights; down's scales are pointed to landing's masked
    ones, for the picked experts alone, and back.
    outputs: log_picks, log_lanes and counts are written whole, the pointer tables only where picked; other
    entries may be stale, so a decode kernel may read picked experts alone. landing: experts over the link
    are pointed to there, as many as it holds, and its lists say what must be copied before they are read:
    launch_gather. Those of them that take an offer are pointed to its slot instead, and inputs.slots and
    inputs.offer_head are changed by the rule of offers.py. ring: where the CPU's jobs go, that of this layer
    as number first_seq + layer, whose cell must be free. None sends nothing: cpu_count must then be all zeros
    (exact mode). ahead: what was fetched for this layer, to which its picks are pointed; the buffers need not
    be filled yet.
    """
    rows, top_k = inputs.picks.shape
    side = inputs.cpu_count.shape[1]
    if side <= rows * top_k:
        raise ValueError(f"cpu_count of side {side} does not cover {rows * top_k} picks")
    plan_layer[(1,)](
        inputs.picks,
        inputs.weights,
        inputs.weights if hit_weights is None else hit_weights,
        inputs.x,
        inputs.slots,
        inputs.heat,
        inputs.cpu_count,
        inputs.slot_addresses,
        outputs.gate_table,
        outputs.up_table,
        outputs.down_table,
        outputs.scale_table,
        inputs.own_scales,
        outputs.log_picks,
        outputs.log_lanes,
        outputs.counts,
        landing.sources,
        landing.targets,
        landing.count,
        landing.skips,
        landing.mask,
        inputs.offers,
        inputs.offer_head,
        outputs.log_kept,
        outputs.counts if ring is None else ring.first_seq,
        outputs.counts if ring is None else ring.fence,
        landing.sources if ahead is None else ahead.experts,
        landing.count if ahead is None else ahead.fetches.count,
        landing.sources if ahead is None else ahead.keeps.sources,
        landing.targets if ahead is None else ahead.keeps.targets,
        landing.count if ahead is None else ahead.keeps.count,
        landing.count if ahead is None else ahead.told,
        inputs.home,
        landing.address,
        landing.num_experts,
        landing.scales.data_ptr(),
        0 if ring is None else ring.address,
        inputs.layer,
        rows,
        rows * top_k,
        side,
        0 if ahead is None else ahead.fetches.address,
        record_bytes=inputs.record_bytes,
        up_offset=inputs.up_offset,
        down_offset=inputs.down_offset,
        weights_offset=0 if ring is None else ring.weights_offset,
        x_offset=0 if ring is None else ring.x_offset,
        hidden=inputs.x.shape[1],
        top_k=top_k,
        width=power_of_two(rows * top_k),
        num_cells=1 if ring is None else ring.num_cells,
        cell_bytes=0 if ring is None else ring.cell_bytes,
        has_cpu=ring is not None,
        num_parts=inputs.num_parts,
        part_blocks=inputs.part_blocks,
        has_ahead=ahead is not None,
        has_hits=hit_weights is not None,
        has_clock=outputs.counts.is_cuda,
    )
