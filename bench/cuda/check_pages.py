"""Does a KV cache whose pages get memory as they fill give the same bits as one that has all of it?

    python -m bench.cuda.check_pages --layers 8 --vram 12 --chunk-slots 4 --chunk 2048

Takes the options of `glm53srv bench-model`; the mode is exact. Two engines after one another, on the same
weights and tokens: sequences of several lengths fill, end and begin again, beside others that decode; in the
middle of a chunk that is staged all other pages get memory, too. Every row of logits must be equal, and the
pages must have had less memory than all at the start, more later, less again at the end. Exit code 1 if not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.cuda.agreement import recording
from bench.cuda.profile_step import say
from glm53srv.bench_model.command import build_engine
from glm53srv.bench_model.driver import Driver
from glm53srv.bench_model.options import BenchOptions, parse_options
from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.synthetic_plan import require_host_memory
from glm53srv.errors import Glm53Error
from glm53srv.machine import MachineFacts, read_machine
from glm53srv.model.published_files import published_model

STEPS = 12
LENGTHS = (700, 9000, 20_000, 4000)
"""Prompts of the four slots, in tokens: of the third most pages need memory that was not there."""


@dataclass(slots=True)
class Found:
    """logits: float32 (rows, vocabulary) of each decode step. lent: slots that the pages had, at some points.
    num_slots: of the cache."""

    logits: list[NDArray[np.float32]] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)
    num_slots: int = 0


def run(options: BenchOptions, machine: MachineFacts) -> Found:
    """Load an engine, give what it computes."""
    found = Found()
    with tempfile.TemporaryDirectory() as directory:
        engine, model, _, routes = build_engine(options, machine, Path(directory), say)
        try:
            found.num_slots = engine.offload.plan.num_slots
            with recording(model.inner, found.logits):
                _drive(engine, Driver(engine, seed=4, routes=routes), found)
            engine.check_slots(200)
        finally:
            engine.close()
    return found


def _drive(engine: CudaEngine, driver: Driver, found: Found) -> None:
    def note() -> None:
        found.lent.append(engine.offload.loans.page_slots)

    note()
    running: list[int] = []
    for slot, length in enumerate(LENGTHS):
        for piece in driver.pieces(slot, length, layers=3):
            driver.step(prefill=piece, decode=running)
        running.append(slot)
        note()
    for _ in range(STEPS):
        driver.step(decode=running)
    driver.step(release=[2], decode=[0, 1, 3])
    driver.step(decode=[0, 1, 3])
    note()
    middle = driver.pieces(2, 6000, layers=2)
    for index, piece in enumerate(middle):
        if index == 1:
            engine.pages.fill(engine.limits.num_pages)
            note()
        driver.step(prefill=piece, decode=[0, 1, 3])
    for _ in range(STEPS):
        driver.step(decode=[3, 2, 1, 0])
    driver.step(release=[0, 1, 2, 3])
    driver.prefill_s(0, 300)
    for _ in range(STEPS):
        driver.step(decode=[0])
    note()
    driver.step(release=[0])


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit code."""
    try:
        options, machine = parse_options(["--mode", "exact", *argv]), read_machine()
        require_host_memory(published_model(options.layers), machine)
    except Glm53Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    grown, whole = (run(replace(options, whole_cache=is_whole), machine) for is_whole in (False, True))
    differing = sum(not np.array_equal(a, b) for a, b in zip(grown.logits, whole.logits, strict=True))
    most, first, last = max(grown.lent), grown.lent[0], grown.lent[-1]
    say(f"{grown.num_slots} slots, {whole.num_slots} with the whole cache; lent to pages {grown.lent}")
    say(f"{len(grown.logits)} steps, {differing} differ")
    is_good = differing == 0 and first < most and last < most and grown.num_slots > whole.num_slots
    say("ok" if is_good else "FAILED")
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
