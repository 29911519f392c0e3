"""Waits for the CPU's answer to a layer's job and adds its partial sums to the GPU's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm53srv.offload.device.gpu.launch import MailRing

BLOCK = 4096
"""Floats of one program: a row of the published model. Each program polls the answer over the link."""

DONE_WORD = tl.constexpr(16)
"""Place in a mailbox cell, in words of 4 bytes."""


@triton.jit(do_not_specialize=["ring", "layer", "num_items"])
def add_partial(
    out,
    counts,
    first_seq,
    ring,
    layer,
    num_items,
    y_offset: tl.constexpr,
    num_cells: tl.constexpr,
    cell_bytes: tl.constexpr,
    block: tl.constexpr,
):
    """See launch_combine."""
    seq = tl.load(first_seq) + layer
    cell = ring + (seq & (num_cells - 1)).to(tl.int64) * cell_bytes
    done = cell.to(tl.pointer_type(tl.int32)) + DONE_WORD
    seen = tl.load(done, volatile=True)
    while seen != seq:
        seen = tl.load(done, volatile=True)
    if tl.load(counts + 2) + tl.load(counts + 3) > 0:
        item = tl.program_id(0) * block + tl.arange(0, block)
        inside = item < num_items
        source = (cell + y_offset).to(tl.pointer_type(tl.float32))
        # Volatile as the word above: neither may come from a cache that the CPU's writes do not reach.
        total = tl.load(out + item, mask=inside) + tl.load(source + item, mask=inside, volatile=True)
        tl.store(out + item, total, mask=inside)


def launch_combine(out: torch.Tensor, counts: torch.Tensor, layer: int, ring: MailRing) -> None:
    """Add the answer to a layer's job to out, float32 (rows, hidden), in place, once it is there.

    counts: int32 (4,), as the layer's plan wrote them; the sums of a job without experts are not read, but
    its answer is waited for too, so that jobs never overtake the workers. The kernel polls without a limit:
    the crew's watchdog answers every job.
    """
    num_items = out.numel()
    add_partial[(triton.cdiv(num_items, BLOCK),)](
        out,
        counts,
        ring.first_seq,
        ring.address,
        layer,
        num_items,
        y_offset=ring.y_offset,
        num_cells=ring.num_cells,
        cell_bytes=ring.cell_bytes,
        block=BLOCK,
    )
