"""Adds the CPU's partial sums to the GPU's, once the stream has waited for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["partial", "num_items"])
def add_partial(out, counts, partial, num_items, block: tl.constexpr):
    """Add num_items floats at address `partial` to out, unless the layer's job was empty."""
    num_cpu = tl.load(counts + 2)
    if num_cpu > 0:
        item = tl.program_id(0) * block + tl.arange(0, block)
        inside = item < num_items
        source = partial.to(tl.pointer_type(tl.float32))
        total = tl.load(out + item, mask=inside) + tl.load(source + item, mask=inside)
        tl.store(out + item, total, mask=inside)


def launch_combine(out: torch.Tensor, counts: torch.Tensor, partial_address: int) -> None:
    """Add the answer of a layer's job to out, float32 (rows, hidden), in place.

    counts: int32 (3,), as the layer's plan wrote them; a job without experts is not read. partial_address: of
    y in the job's cell, as the device sees it. The stream must have waited for `done`.
    """
    num_items = out.numel()
    add_partial[(triton.cdiv(num_items, BLOCK),)](out, counts, partial_address, num_items, block=BLOCK)
