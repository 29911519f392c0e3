"""Copies experts between places given by address: many small copies as one launch.

The copy engine moves admissions and staging; this kernel is for where a launch costs less than a list of
copies. It takes a fixed number of programs, few enough to leave the multiprocessors to the experts: 16 were
seen to fill PCIe (0xSero/glm53-flash-offload).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_PROGRAMS = 16
ITEMS = 2048


@triton.jit(do_not_specialize=["num_copies"])
def gather_copy(
    sources, targets, num_copies, words: tl.constexpr, num_programs: tl.constexpr, items: tl.constexpr
):
    """Move num_copies records of `words` 8-byte words; piece p of all pieces goes to program p mod count."""
    pieces_per_copy: tl.constexpr = (words + items - 1) // items
    for piece in range(tl.program_id(0), num_copies * pieces_per_copy, num_programs):
        copy = piece // pieces_per_copy
        source = tl.load(sources + copy).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + copy).to(tl.pointer_type(tl.int64))
        item = (piece % pieces_per_copy) * items + tl.arange(0, items)
        inside = item < words
        data = tl.load(tl.multiple_of(source, 16) + item, mask=inside)
        tl.store(tl.multiple_of(target, 16) + item, data, mask=inside)


def launch_copy(sources: torch.Tensor, targets: torch.Tensor, num_bytes: int) -> None:
    """Copy num_bytes from each of sources to each of targets: int64 (count,) addresses, multiples of 16.

    num_bytes is a multiple of 16. No target may overlap a source or another target.
    """
    if len(sources) != len(targets) or num_bytes % 16:
        raise ValueError(f"cannot copy {num_bytes} bytes from {len(sources)} to {len(targets)} places")
    if len(sources) == 0:
        return
    gather_copy[(NUM_PROGRAMS,)](
        sources, targets, len(sources), words=num_bytes // 8, num_programs=NUM_PROGRAMS, items=ITEMS
    )
