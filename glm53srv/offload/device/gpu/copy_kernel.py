"""Copies the experts that a layer's plan wants over the link into VRAM, before they are computed.

The experts' kernels can read host memory in place, but each of their programs then has few reads on the way
and may not fill the link: on an H200 0.20 ms per expert when nothing else ran. This kernel took 0.187 (51
GB/s; the copy engine 54, but the host cannot give it its orders, since it does not know the picks), and as
long beside 14 CPU workers that read the same memory.

What a copy costs others goes by the bytes that all of its programs have on their way at once, see USUAL.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import triton
import triton.language as tl

from glm53srv.offload.device.gpu.launch import UNIT_BYTES, WORD_BYTES, Landing, RecordCut


@dataclass(frozen=True, slots=True)
class CopyShape:
    """How a copy is spread out. items: words of 8 bytes that a program has on their way at once, a power of
    two; warps: of a program."""

    programs: int
    warps: int
    items: int


USUAL = CopyShape(8, 8, 4096)
"""256 KiB on their way, which fill PCIe 5.0 x16: 0.187 ms per expert. More bytes only queue, and reads of
others with them: beside copies with 256 KiB on their way, of 2 programs or of 16, a product of 33 us took 55,
beside 512 KiB 85, beside 1 MiB 141 (H200, 2026-11-30, between two events, which wait for some of it
themselves: in traces of steps one of 46 us takes 47 beside 256 KiB)."""


SCALES = tl.constexpr(1024)
"""Masked scales that are written at once. Never as many as a program's items: in tensors of one shape Triton
gives each thread as many neighbours everywhere, and the eight that a store of scales wants made each load of
a copy touch every other 16 bytes: 0.28 ms per expert and not 0.19 (H200, 2026-11-30)."""


@triton.jit
def gather_experts(
    sources,
    targets,
    count,
    skips,
    scales,
    mask,
    words: tl.constexpr,
    num_programs: tl.constexpr,
    items: tl.constexpr,
    is_cut: tl.constexpr,
    gate_row: tl.constexpr,
    gate_block: tl.constexpr,
    up_begin: tl.constexpr,
    up_row: tl.constexpr,
    up_block: tl.constexpr,
    down_begin: tl.constexpr,
    down_block: tl.constexpr,
    num_scales: tl.constexpr,
    unit_words: tl.constexpr,
):
    """Move `count` records of `words` 8-byte words; piece p of all pieces goes to program p mod programs.

    is_cut: of the first skips[copy] blocks of the intermediate nothing is read; and one program writes the
    masked scales.
    """
    if is_cut:  # noqa: SIM102  # known when this is compiled, the other is not
        if tl.program_id(0) == num_programs - 1:
            own = tl.load(mask)
            if own != 0:
                first = tl.load(mask + 1) * 128
                for begin in range(0, num_scales, SCALES):
                    place = begin + tl.arange(0, SCALES)
                    there = (place >= first) & (place < num_scales)
                    scale = tl.load(own.to(tl.pointer_type(tl.float16)) + place, mask=there, other=0.0)
                    tl.store(scales + place, scale, mask=place < num_scales)
    pieces_per_copy: tl.constexpr = (words + items - 1) // items
    num_pieces = tl.load(count) * pieces_per_copy
    for piece in range(tl.program_id(0), num_pieces, num_programs):
        copy = piece // pieces_per_copy
        source = tl.load(sources + copy).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + copy).to(tl.pointer_type(tl.int64))
        item = (piece % pieces_per_copy) * items + tl.arange(0, items)
        inside = item < words
        if is_cut:
            # A masked word costs no traffic: of a shared expert a piece has fewer bytes on their way at once,
            # and there are as many pieces; still 256 KiB in all programs at half an expert.
            # In units of 128 bytes, so that the compiler sees neighbours share their fate and moves 16 bytes.
            unit = item // unit_words
            in_up = (unit - up_begin) % up_row // up_block
            block = tl.where(unit < up_begin, unit % gate_row // gate_block, in_up)
            block = tl.where(unit < down_begin, block, (unit - down_begin) // down_block)
            inside = inside & (block >= tl.load(skips + copy))
        data = tl.load(tl.multiple_of(source, 16) + item, mask=inside)
        tl.store(tl.multiple_of(target, 16) + item, data, mask=inside)


NO_CUT = RecordCut(1, 1, 1, 1, 1, 1, 1)
"""Stands where nothing is left out."""


def launch_gather(
    landing: Landing, num_bytes: int, shape: CopyShape = USUAL, *, cut: RecordCut | None = None
) -> None:
    """Copy num_bytes, a multiple of 16, of each expert that landing's lists name, on the current stream.

    Addresses are multiples of 16. No target may overlap a source or another target. cut: how landing's skips
    are found in a record, None where they are all 0; with it, landing's scales are made from its mask.
    """
    if num_bytes % 16:
        raise ValueError(f"cannot copy {num_bytes} bytes: not a multiple of 16")
    if landing.num_experts == 0:
        return
    gather_experts[(shape.programs,)](
        landing.sources,
        landing.targets,
        landing.count,
        landing.skips,
        landing.scales,
        landing.mask,
        words=num_bytes // 8,
        num_programs=shape.programs,
        items=shape.items,
        is_cut=cut is not None,
        **dataclasses.asdict(cut or NO_CUT),
        num_scales=len(landing.scales),
        unit_words=UNIT_BYTES // WORD_BYTES,
        num_warps=shape.warps,
    )
