"""How long does the package's decode kernel for experts take, by experts and by pieces of its sums?

    python -m bench.cuda.pieces
    python -m bench.cuda.pieces --rows 1 --pieces 2 4 8

Random weights of the published dimensions, no model, nothing beside it. A layer's launch takes its sums in as
many pieces as its scratch has slots for (glm53srv/engine/cuda/expert_launches.py); here each number of pieces
has scratch of its own. A graph of 20 launches, the best of 5 replays, per launch.

Exit code 2 without the package's compiled part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.cuda.beside_copies import import_extension, make_experts
from bench.cuda.profile_step import say
from bench.errors import BadInput
from glm53srv.engine.cuda.package import PINNED

COUNTS = (0, 1, 2, 3, 4, 6, 8)
"""Experts of a row; the kernel has 8 picks in any case, of which weights of 0 leave some out."""
NUM_LAUNCHES, NUM_REPLAYS = 20, 5
TOP_K, MOST_SLOTS = 8, 256


def time_us(run: Callable[[int], None]) -> float:
    """Give the microseconds of a launch."""
    for number in range(3):
        run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(NUM_LAUNCHES):
            run(number)
    graph.replay()
    found = []
    for _ in range(NUM_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / NUM_LAUNCHES)
    return float(min(found))


def measure(extension: Any, rows: Sequence[int], pieces: Sequence[int]) -> None:
    """Print a line for each number of rows and of pieces."""
    device = torch.device("cuda")
    for num_rows in rows:
        for num_pieces in pieces:
            if num_rows * TOP_K * num_pieces > MOST_SLOTS:
                continue
            experts = make_experts(extension, device, num_rows, num_pieces)
            found = [f"{count}: {time_us(experts(count)):.1f}" for count in COUNTS]
            say(f"rows {num_rows}, pieces {num_pieces}; us by experts a row: {', '.join(found)}")


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit code."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="bench.cuda.pieces", description=description)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 2, 4), choices=(1, 2, 3, 4))
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=(1, 2, 4, 8, 16), choices=range(1, 33), metavar="N"
    )
    options = parser.parse_args(argv)
    limit = {"EXL3_MOE_COOP_KSPLIT": str(max(options.pieces))}  # beside the scratch's
    try:
        extension = import_extension(PINNED["fast"] | limit)
    except BadInput as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with torch.inference_mode():
        measure(extension, options.rows, options.pieces)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
