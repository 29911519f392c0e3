"""Orders to the copy engine, by way of the courier (offload/device/courier.py), and waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm53srv.offload.device.courier import CELL_BYTES, MOST_COPIES, Courier
from glm53srv.offload.device.gpu.copy_kernel import USUAL
from glm53srv.offload.device.gpu.launch import WORD_BYTES, Landing, int32_bits

MOST_POLLS = 20_000
"""After which a kernel copies by itself what it waits for: some milliseconds. The courier needs the driver's
lock, and another thread may hold it while it waits for the device, say to load a kernel: that wait would
never end."""
COPIES = tl.constexpr(MOST_COPIES)
CELL = tl.constexpr(CELL_BYTES)
COUNT_AT, SOURCES_AT, TARGETS_AT = tl.constexpr(1), tl.constexpr(1), tl.constexpr(5)
"""Places in a cell: a word of 4 bytes, and two of 8 bytes. Posted is word 0."""


@dataclass(frozen=True, slots=True)
class OrderRing:
    """The courier's ring as kernels see it. address: of the cells, late: of a word that is 1 once a kernel
    did not wait any longer, both in host memory. The others on the device, int32.

    newest: (1,), number of the newest order. expected: (turns,), for each the number that is waited for.
    arrived: (1,), the number up to which all copies are done. gate: (3,), how many experts may be fetched for
    a layer; 1 once a kernel did not wait, after which none is until the host has set it to 0 again; how many
    for a layer behind a latent attention.
    fence: (1,), for the fence alone.
    """

    address: int
    num_cells: int
    late: int
    newest: torch.Tensor
    expected: torch.Tensor
    arrived: torch.Tensor
    gate: torch.Tensor
    fence: torch.Tensor


def make_order_ring(courier: Courier, turns: int, gate: torch.Tensor, device: torch.device) -> OrderRing:
    """Describe a courier's ring; registered memory lies for the device where it does for the host."""
    before = int32_bits((courier.first_seq - 1) & 0xFFFFFFFF)
    newest, expected, arrived = (
        torch.full((count,), before, dtype=torch.int32, device=device) for count in (1, turns, 1)
    )
    fence = torch.zeros(1, dtype=torch.int32, device=device)
    address, late = courier.region.address, courier.late_address
    return OrderRing(address, courier.num_cells, late, newest, expected, arrived, gate, fence)


@triton.jit(do_not_specialize=["ring"])
def post_order(
    sources,
    targets,
    count,
    newest,
    expected,
    fence,
    ring,
    turn: tl.constexpr,
    num_cells: tl.constexpr,
    num_buffers: tl.constexpr,
):
    """See launch_order."""
    number = tl.load(count)
    seq = tl.load(newest) + tl.where(number > 0, 1, 0)
    tl.store(expected + turn, seq)
    if number > 0:
        cell = ring + (seq & (num_cells - 1)).to(tl.int64) * CELL
        words, longs = cell.to(tl.pointer_type(tl.int32)), cell.to(tl.pointer_type(tl.int64))
        item = tl.arange(0, COPIES)
        wanted = (item < number) & (item < num_buffers)
        tl.store(longs + SOURCES_AT + item, tl.load(sources + item, mask=wanted, other=0))
        tl.store(longs + TARGETS_AT + item, tl.load(targets + item, mask=wanted, other=0))
        tl.store(words + COUNT_AT, number)
        tl.store(newest, seq)
        # As a job for the CPU is posted, see plan_kernel.py.
        tl.debug_barrier()
        zero = tl.atomic_add(fence, 0, sem="acq_rel", scope="sys")
        tl.store(words, seq + zero)


@triton.jit(do_not_specialize=["late"])
def await_order(
    sources,
    targets,
    count,
    arrived,
    expected,
    gate,
    late,
    turn: tl.constexpr,
    words: tl.constexpr,
    num_programs: tl.constexpr,
    items: tl.constexpr,
    most_polls: tl.constexpr,
):
    """See launch_await."""
    # With nothing ordered for this layer the number is an earlier order's, which is none of its concern.
    number = tl.load(count)
    wanted = tl.load(expected + turn)
    missing = tl.where(number > 0, wanted - tl.load(arrived, volatile=True), 0)
    polls = 0
    while (missing > 0) & (polls < most_polls):
        missing = wanted - tl.load(arrived, volatile=True)
        polls += 1
    if missing > 0:
        tl.store(gate + 1, 1)
        tl.store(late.to(tl.pointer_type(tl.int32)), 1)
        pieces_per_copy: tl.constexpr = (words + items - 1) // items
        for piece in range(tl.program_id(0), number * pieces_per_copy, num_programs):
            copy = piece // pieces_per_copy
            source = tl.load(sources + copy).to(tl.pointer_type(tl.int64))
            target = tl.load(targets + copy).to(tl.pointer_type(tl.int64))
            item = (piece % pieces_per_copy) * items + tl.arange(0, items)
            data = tl.load(tl.multiple_of(source, 16) + item, mask=item < words)
            tl.store(tl.multiple_of(target, 16) + item, data, mask=item < words)


def launch_order(landing: Landing, ring: OrderRing, turn: int) -> None:
    """Order the copies that landing lists, at most MOST_COPIES, on the current stream.

    They begin when the courier sees the order, not in this stream's order: what reads or writes the targets
    must be done before. turn: where the order's number is left for launch_await.
    """
    post_order[(1,)](
        landing.sources,
        landing.targets,
        landing.count,
        ring.newest,
        ring.expected,
        ring.fence,
        ring.address,
        turn=turn,
        num_cells=ring.num_cells,
        num_buffers=len(landing.sources),
        num_warps=1,
    )


def launch_await(
    landing: Landing, ring: OrderRing, turn: int, num_bytes: int, most_polls: int = MOST_POLLS
) -> None:
    """Wait on the current stream for the newest order of this turn, that of landing's lists, num_bytes each.

    After most_polls looks the kernel copies by itself, says so at ring.late and closes ring.gate: the ordered
    copies may still come, with the same bytes, and would spoil the targets once they are used for others. So
    none may be ordered before the host has waited for the courier's stream and has opened the gate again.
    """
    await_order[(USUAL.programs,)](
        landing.sources,
        landing.targets,
        landing.count,
        ring.arrived,
        ring.expected,
        ring.gate,
        ring.late,
        turn=turn,
        words=num_bytes // WORD_BYTES,
        num_programs=USUAL.programs,
        items=USUAL.items,
        most_polls=most_polls,
        num_warps=USUAL.warps,
    )
