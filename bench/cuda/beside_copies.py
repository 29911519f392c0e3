"""How long do the package's decode products take beside copies over the link, by the shape of the copies?

    python -m bench.cuda.beside_copies --mode fast
    python -m bench.cuda.beside_copies --mode exact --shapes 8x8x4096 2x16x16384

Random weights of the published dimensions, no model. Of each shape (programs x warps x words of 8 bytes that
a program has on their way at once) two experts are copied out of pinned memory, and each product begins
behind the copy's begin; medians of 15. Times are taken between two events, which wait for some of a copy's
traffic themselves: compare them with each other, and lengths in a step with a trace (bench.cuda.variants).
A product that takes about as long as what is left of the copy has waited for its end.

Exit code 2 without the package's compiled part.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.cuda.profile_step import say
from bench.cuda.variants import parse_shape
from bench.errors import BadInput
from glm53srv.engine.cuda.expert_launches import num_counters
from glm53srv.engine.cuda.package import PINNED
from glm53srv.offload.device.gpu.copy_kernel import CopyShape, launch_gather
from glm53srv.offload.device.gpu.launch import Landing, make_landing

RECORD = 9_437_184
"""Bytes of a published expert at 3 bits."""
HIDDEN, NEURONS = 4096, 2048
NUM_RECORDS, NUM_COPIED, TRIALS = 48, 2, 15
SHAPES = ("8x8x4096", "16x4x2048", "2x16x16384", "4x16x8192", "32x4x2048", "4x16x16384", "8x16x16384")
QUEUED_CYCLES, LEAD_CYCLES = 800_000, 120_000
"""That the device sleeps while a trial is enqueued; and between a copy's begin and the product's."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Pinned records, of which each trial copies two others. landing: where to, and the kernel's lists."""

    records: torch.Tensor
    landing: Landing
    buffers: torch.Tensor

    def choose(self, trial: int) -> None:
        """Name the two records that the next launch copies."""
        chosen = (NUM_COPIED * trial + torch.arange(NUM_COPIED)) % NUM_RECORDS
        self.landing.sources.copy_(self.records.data_ptr() + chosen * RECORD)


def make_copies(device: torch.device) -> Copies:
    """Allocate and fill."""
    records = torch.empty((NUM_RECORDS, RECORD // 8), dtype=torch.int64, pin_memory=True)
    records.random_()
    buffers = torch.zeros((NUM_COPIED, RECORD), dtype=torch.uint8, device=device)
    landing = make_landing(buffers, NEURONS)
    landing.targets.copy_(buffers.data_ptr() + torch.arange(NUM_COPIED) * RECORD)
    landing.count.fill_(NUM_COPIED)
    return Copies(records, landing, buffers)


def make_products(extension: Any, device: torch.device) -> dict[str, Callable[[int], None]]:
    """Give launches by name; the argument picks among several weights, so that none stays in a cache."""

    def scales(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * 0.02).half()

    def linear(inputs: int, outputs: int, dtype: torch.dtype) -> Callable[[int], None]:
        shape = (6, inputs // 16, outputs // 16, 80)  # 5 bits
        trellis = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
        suh, svh, x, rotated = scales(inputs), scales(outputs), scales(1, inputs), scales(1, inputs)
        y = torch.empty((1, outputs), dtype=dtype, device=device)

        def run(number: int) -> None:
            extension.exl3_gemm(x, trellis[number % 6], y, suh, rotated, svh, -1, False, True, 0)

        return run

    experts = make_experts(extension, device)
    return {
        "4096x12288": linear(4096, 12288, torch.float32),
        "4096x4096": linear(4096, 4096, torch.float32),
        "4096x2048": linear(4096, 2048, torch.float16),
        "2 experts": experts(2),
        "4 experts": experts(4),
    }


def make_experts(
    extension: Any, device: torch.device, rows: int = 1, pieces: int = 1
) -> Callable[[int], Callable[[int], None]]:
    """Give launches by the number of experts that each row has; theirs take the number of a run.

    pieces: for which there is scratch, at most 256 / (8 rows).
    """

    def scales(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * 0.02).half()

    num_experts, top_k = 32, 8
    num_slots = rows * top_k * pieces
    records = torch.randint(-(2**62), 2**62, (num_experts, RECORD // 8), dtype=torch.int64, device=device)
    numbers = torch.arange(num_experts, device=device)
    tables: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for part, (inputs, outputs) in enumerate(((HIDDEN, NEURONS), (HIDDEN, NEURONS), (NEURONS, HIDDEN))):
        vectors = (scales(num_experts, inputs), scales(num_experts, outputs))
        kept += vectors
        tables.append(records.data_ptr() + part * RECORD // 3 + numbers * RECORD)
        tables += [each.data_ptr() + numbers * each.shape[1] * 2 for each in vectors]
    x = scales(rows, HIDDEN)
    buffers = [scales(num_slots, size) for size in (HIDDEN, HIDDEN, NEURONS, NEURONS, NEURONS)]
    sums = torch.empty((num_slots, HIDDEN), device=device)
    counters = torch.zeros(num_counters(num_slots, 4, NEURONS, HIDDEN), dtype=torch.int32, device=device)
    out = torch.empty((4, HIDDEN), device=device)

    def experts(count: int) -> Callable[[int], None]:
        weights = torch.zeros((rows, top_k), device=device).half()
        weights[:, :count] = 0.1
        picks = [
            torch.stack([torch.randperm(num_experts, device=device)[:top_k] for _ in range(rows)])
            for _ in range(8)
        ]
        kinds = (None, None, None, 3.0, 3.0, 3.0, False, True, 0, 0.0, True)

        def run(number: int) -> None:
            assert kept
            extension.exl3_moe_coop(
                *(x, picks[number % 8], weights, -1, -1, HIDDEN, *tables, *kinds, *buffers, sums),
                *(counters, out, None, None),
            )

        return run

    return experts


class Trials:
    """Runs copies on a stream of their own and products on the current one."""

    def __init__(self, copies: Copies) -> None:
        self._copies, self._side, self._number = copies, torch.cuda.Stream(), 0

    def run(self, shape: CopyShape | None, product: Callable[[int], None] | None) -> tuple[float, float]:
        """Give the median microseconds of a product, and of the copies beside it; 0 for what is None."""
        found = [self._once(shape, product) for _ in range(TRIALS)]
        return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)

    def _once(self, shape: CopyShape | None, product: Callable[[int], None] | None) -> tuple[float, float]:
        self._number += 1
        self._copies.choose(self._number)
        begin, copy_begin, copy_end, product_begin, product_end = (
            torch.cuda.Event(enable_timing=True) for _ in range(5)
        )
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUED_CYCLES)
        begin.record()
        if shape is not None:
            self._side.wait_event(begin)
            with torch.cuda.stream(self._side):
                copy_begin.record()
                launch_gather(self._copies.landing, RECORD, shape)
                copy_end.record()
        torch.cuda._sleep(LEAD_CYCLES)
        product_begin.record()
        if product is not None:
            product(self._number)
        product_end.record()
        torch.cuda.synchronize()
        copied = 0.0 if shape is None else copy_begin.elapsed_time(copy_end) * 1e3
        return product_begin.elapsed_time(product_end) * 1e3 if product else 0.0, copied


def import_extension(variables: Mapping[str, str]) -> Any:
    """Import the package's compiled part, which reads its variables then. Raises BadInput."""
    os.environ.update(variables)
    try:
        return importlib.import_module("exllamav3_ext")
    except ImportError as error:
        raise BadInput(f"exllamav3's compiled part is not there: {error}") from error


def measure(extension: Any, shapes: Sequence[CopyShape]) -> None:
    """Print a line per shape."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    products, trials = make_products(extension, device), Trials(make_copies(device))
    for product in products.values():
        for number in range(8):  # the package times its kernels in a shape's first runs
            product(number)
    for shape in (None, *shapes):
        trials.run(shape, None)
        alone = trials.run(shape, None)[1]
        found = [f"{name} {trials.run(shape, product)[0]:.0f}" for name, product in products.items()]
        name = "no copy" if shape is None else f"{shape.programs}x{shape.warps}x{shape.items}"
        kib = 0 if shape is None else shape.programs * shape.items // 128
        say(f"{name}, {kib} KiB on their way: copies {alone:.0f} us; products us: {', '.join(found)}")


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit code."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="bench.cuda.beside_copies", description=description)
    parser.add_argument("--mode", choices=sorted(PINNED), default="fast")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="programs x warps x words, as 8x8x4096")
    options = parser.parse_args(argv)
    try:
        shapes = [parse_shape(text) for text in options.shapes]
        extension = import_extension(PINNED[options.mode])
    except (ValueError, BadInput) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with torch.inference_mode():
        measure(extension, shapes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
