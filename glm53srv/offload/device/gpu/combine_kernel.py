"""Adds up a layer: the GPU's sums, and the CPU's behind a wait for its answer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm53srv.offload.device.gpu.launch import MailRing

BLOCK = 512
"""Floats of one program, 16 bytes of a thread: eight programs read a row of the published model over the
link. One program of 4 warps took 11 us for that. Who waits is one warp, in a kernel of its own, because each
warp that looks costs a microsecond: a wait that was over at once took 5 us with 4 warps and 16 with 16 (H200,
traced, 2026-11-30)."""

DONE_WORD = tl.constexpr(16)
"""Place in a mailbox cell, in words of 4 bytes."""


@triton.jit(do_not_specialize=["ring", "layer"])
def await_answer(
    counts,
    first_seq,
    ring,
    layer,
    num_cells: tl.constexpr,
    cell_bytes: tl.constexpr,
    has_clock: tl.constexpr,
):
    """See launch_combine."""
    if has_clock:
        arrived = tl.extra.cuda.globaltimer()
    seq = tl.load(first_seq) + layer
    cell = ring + (seq & (num_cells - 1)).to(tl.int64) * cell_bytes
    done = cell.to(tl.pointer_type(tl.int32)) + DONE_WORD
    seen = tl.load(done, volatile=True)
    while seen != seq:
        seen = tl.load(done, volatile=True)
    if has_clock:
        tl.store(counts + 4, arrived.to(tl.int32))
        tl.store(counts + 5, tl.extra.cuda.globaltimer().to(tl.int32))


@triton.jit(do_not_specialize=["ring", "layer", "rows"])
def add_partial(
    out,
    hit_sums,
    counts,
    first_seq,
    ring,
    layer,
    rows,
    hidden: tl.constexpr,
    y_offset: tl.constexpr,
    num_cells: tl.constexpr,
    cell_bytes: tl.constexpr,
    block: tl.constexpr,
    has_hits: tl.constexpr,
):
    """See launch_combine. Behind await_answer."""
    num_cpu = tl.load(counts + 2) + tl.load(counts + 6)
    if has_hits or num_cpu > 0:
        item = tl.program_id(0) * block + tl.arange(0, block)
        inside = item < rows * hidden
        own = tl.load(tl.multiple_of(out, 16) + item, mask=inside)
        if has_hits:
            own += tl.load(tl.multiple_of(hit_sums, 16) + item, mask=inside)
        if num_cpu > 0:
            seq = tl.load(first_seq) + layer
            cell = ring + (seq & (num_cells - 1)).to(tl.int64) * cell_bytes
            # Cells and their parts begin at multiples of 64 bytes; told so, a thread loads 16 bytes at once.
            source = tl.multiple_of((cell + y_offset).to(tl.pointer_type(tl.float32)), 64)
            # Volatile: it may not come from a cache that the CPU's writes do not reach.
            own += tl.load(source + item, mask=inside, volatile=True)
        tl.store(tl.multiple_of(out, 16) + item, own, mask=inside)


def launch_combine(
    out: torch.Tensor,
    counts: torch.Tensor,
    layer: int,
    ring: MailRing,
    hit_sums: torch.Tensor | None = None,
) -> None:
    """Add the answer to a layer's job to out, float32 (rows, hidden), in place, once it is there.

    hit_sums: float32 (rows or more, hidden), contiguous: added, too, if given. counts: int32 (COUNT_WORDS,),
    as the layer's plan wrote them; its last two times are added. The sums of a job without experts are not
    read, but its answer is waited for too, so that jobs never overtake the workers. The kernel polls without
    a limit: the crew's watchdog answers every job.
    """
    rows, hidden = out.shape
    await_answer[(1,)](
        counts,
        ring.first_seq,
        ring.address,
        layer,
        num_cells=ring.num_cells,
        cell_bytes=ring.cell_bytes,
        has_clock=out.is_cuda,
        num_warps=1,
    )
    add_partial[(triton.cdiv(rows * hidden, BLOCK),)](
        out,
        out if hit_sums is None else hit_sums,
        counts,
        ring.first_seq,
        ring.address,
        layer,
        rows,
        hidden=hidden,
        y_offset=ring.y_offset,
        num_cells=ring.num_cells,
        cell_bytes=ring.cell_bytes,
        block=BLOCK,
        has_hits=hit_sums is not None,
        num_warps=4,
    )
