"""Do a layer's sums come out the same however its experts are divided between CPU and GPU, and its kernels
between launches and streams on the GPU? At the published dimensions.

    python -m bench.cuda.check_sharing --layers 6

Takes the options of `glm53srv bench-model`; the mode is fast. The same tokens run through decode steps of one
and of four rows: no expert on the CPU and one launch, which must repeat bit for bit, also with the gates of
KDA layers behind their projections and not beside them; no expert on the CPU and two launches; whole experts
on the CPU; experts shared between it and the link, with costs pinned so that nearly every layer's misses are
split. The routes are imposed, so that no rounding picks other experts. Neither two launches nor shared
experts may be further from the first than whole ones on the CPU are, by more than a half. (The demo model's
experts have one block of neurons and cannot be shared.) Exit code 1 if they are.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cuda.agreement import recording
from bench.cuda.profile_step import say
from glm53srv.bench_model.command import build_engine
from glm53srv.bench_model.driver import Driver
from glm53srv.bench_model.options import parse_options
from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.synthetic_plan import require_host_memory
from glm53srv.errors import Glm53Error
from glm53srv.machine import read_machine
from glm53srv.model.published_files import published_model
from glm53srv.offload.cost import CostOverrides

STEPS = 24
NONE, EVEN = CostOverrides(1000.0, 1000.0, 0.2), CostOverrides(0.0, 0.25, 0.2)
MARGIN = 1.5


def run(
    engine: CudaEngine,
    model: Any,
    routes: Any,
    costs: CostOverrides,
    *,
    shares: bool,
    splits: bool = True,
    has_gates_beside: bool = True,
) -> list[NDArray[np.float32]]:
    """Give the logits of STEPS steps of one row and of four, float32 (rows, vocabulary) each."""
    model.gates.is_on = has_gates_beside
    engine.change_workers("AUTO", None, costs)
    engine.offload.share_experts(shares)
    engine.offload.layers.split_launches(splits)
    engine.capture()
    found: list[NDArray[np.float32]] = []
    routes.rewind()
    driver = Driver(engine, seed=3, routes=routes)
    for width in (1, 4):
        slots = list(range(width))
        for slot in slots:
            driver.prefill_s(slot, 40)
        with recording(model.inner, found):
            for _ in range(STEPS):
                driver.step(decode=slots)
        driver.step(release=slots)
    return found


def distance(first: list[NDArray[np.float32]], second: list[NDArray[np.float32]]) -> float:
    """Give the mean relative distance of the rows."""
    pairs = [
        (a, b) for left, right in zip(first, second, strict=True) for a, b in zip(left, right, strict=True)
    ]
    return float(np.mean([np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in pairs]))


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit code."""
    try:
        options, machine = parse_options(["--mode", "fast", *argv]), read_machine()
        require_host_memory(published_model(options.layers), machine)
    except Glm53Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with tempfile.TemporaryDirectory() as directory:
        engine, model, _, routes = build_engine(options, machine, Path(directory), say)
        try:
            none = run(engine, model, routes, NONE, shares=False, splits=False)
            again = run(engine, model, routes, NONE, shares=False, splits=False)
            behind = run(engine, model, routes, NONE, shares=False, splits=False, has_gates_beside=False)
            split = run(engine, model, routes, NONE, shares=False)
            before = engine.offload.counts.num_split
            whole = run(engine, model, routes, EVEN, shares=False)
            num_whole = engine.offload.counts.num_split - before
            parts = run(engine, model, routes, EVEN, shares=True)
            num_split = engine.offload.counts.num_split - before - num_whole
        finally:
            engine.close()
    control, by_split, by_whole, by_parts = (distance(none, each) for each in (again, split, whole, parts))
    by_gates = distance(none, behind)
    say(f"none against none {control:.2e}, gates behind {by_gates:.2e}; in two launches {by_split:.2e}")
    say(f"whole {by_whole:.2e}, {num_whole} shared; parts {by_parts:.2e}, {num_split} shared")
    is_good = control == by_gates == 0 and num_whole == 0 and num_split > 0 and by_split > 0
    is_good = is_good and max(by_split, by_parts) <= MARGIN * by_whole
    say("ok" if is_good else "FAILED")
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
