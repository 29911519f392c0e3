"""Copies the experts that a layer's plan wants over the link into VRAM, before they are computed.

The experts' kernels can read host memory in place, but each of their programs then has few reads on the way
and may not fill the link: on an H200 0.20 ms per expert when nothing else ran, and 0.28 by a trace of whole
steps. This kernel took 0.187, with and without 14 CPU workers that read the same memory (51 GB/s; the copy
engine 54, but the host cannot give it its orders, since it does not know the picks).

The number of programs did not matter there from 16 to 264; few leave multiprocessors to the shared expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glm53srv.offload.device.gpu.launch import Landing

NUM_PROGRAMS = 32
ITEMS = 2048
"""Words of a program's piece: 16 KiB on their way at once."""


@triton.jit
def gather_experts(
    sources, targets, count, words: tl.constexpr, num_programs: tl.constexpr, items: tl.constexpr
):
    """Move `count` records of `words` 8-byte words; piece p of all pieces goes to program p mod programs."""
    pieces_per_copy: tl.constexpr = (words + items - 1) // items
    num_pieces = tl.load(count) * pieces_per_copy
    for piece in range(tl.program_id(0), num_pieces, num_programs):
        copy = piece // pieces_per_copy
        source = tl.load(sources + copy).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + copy).to(tl.pointer_type(tl.int64))
        item = (piece % pieces_per_copy) * items + tl.arange(0, items)
        inside = item < words
        data = tl.load(tl.multiple_of(source, 16) + item, mask=inside)
        tl.store(tl.multiple_of(target, 16) + item, data, mask=inside)


def launch_gather(landing: Landing, num_bytes: int, num_programs: int = NUM_PROGRAMS) -> None:
    """Copy num_bytes, a multiple of 16, of each expert that landing's lists name, on the current stream.

    Addresses are multiples of 16. No target may overlap a source or another target.
    """
    if num_bytes % 16:
        raise ValueError(f"cannot copy {num_bytes} bytes: not a multiple of 16")
    if landing.num_experts == 0:
        return
    gather_experts[(num_programs,)](
        landing.sources,
        landing.targets,
        landing.count,
        words=num_bytes // 8,
        num_programs=num_programs,
        items=ITEMS,
    )
