"""A model of a decode step's lanes: what does it cost and gain to fetch experts ahead of their layer?

    python -m bench.lanes_model --machine h200 --rows 1 2 4
    python -m bench.lanes_model --machine pcie4 --copy-ms 0.75 --rows 1 --ahead 0/0 1/1 1/2 2/2

bench.replay_routing knows caches and routes, but no look-ahead; this knows neither, and plays the time line
of one layer after the other instead:

    plan      the misses of a layer are drawn; those that were fetched and picked are none. A split that knows
              the costs of both lanes, fitted to the layers before as an engine does, gives some to the CPU.
    link      what of the fetches is still on its way and the layer's own copies share it by halves
    experts   begin when copies and fetches are there, those in VRAM before; the CPU's sums are added
    gap       attention and all else up to the next plan. Fetches begin behind the layer's own copies, and
              what the gap does not hold is on its way at the next plan.

--ahead A/B fetches A experts for a layer and B for one behind a latent attention, each fourth. Not modelled:
host memory that both lanes read, which experts are evicted, the routes of one token after the other. Its
constants are medians of traces (bench/results/2026-11-30-h200-pages) and assumptions that stand beside them;
for the host that they come from it says 47.0, 47.2 and 51.3 tok/s of what ran at 45.0, 47.0 and 48.9 at best.
Take differences from it, and measure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from bench.errors import BadInput
from bench.report import run_command

LAYERS = 42
ACROSS_EVERY = 4
"""One layer of so many has a latent attention behind it."""
RECALL = (0.74, 0.69, 0.63, 0.57, 0.52)
"""How often the first, second .. fetched expert is picked: assumed so that of two a layer .71 are right and
of three .69; .70 and .69 were measured."""
PARTS = 16
LEAST_PARTS = 2
HAND_OVER_MS = 0.007
HEAD_MS = 0.9
"""From the last layer to the first plan of the next step."""
ORDER_MS = 0.016
"""From the end of a layer's copies to the first fetch."""
GUESS_MS = 0.05
"""From a plan to its guess."""
GATHER_SHARE = 1.09
"""A layer's own copy, by a kernel, in copies of the engine; both at once are BOTH_SHARE."""
BOTH_SHARE = 1.07
CPU_SPREAD = 0.15
"""Of the logarithm of a CPU job's time."""
MEMORY_LAYERS = 2000
STEPS_A_TABLE = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Times, in ms, of steps of so many rows. misses: (picks, share) of a binomial draw.

    gap, across: from a layer's end to the next plan, without and with a latent attention. hits, last: experts
    in VRAM, and those behind their copies. cpu: a job's fixed part, and an expert's.
    """

    misses: tuple[int, float]
    gap: float
    across: float
    hits: float
    last: float
    cpu: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Machine:
    """copy_ms: one expert by the copy engine."""

    copy_ms: float
    rows: dict[int, Rows]


H200 = Machine(
    0.174,
    {
        1: Rows((8, 0.47), 0.137, 0.262, 0.094, 0.048, (0.0425, 0.1256)),
        2: Rows((16, 0.56), 0.169, 0.450, 0.120, 0.0875, (0.09, 0.125)),
        4: Rows((28, 0.685), 0.200, 0.500, 0.150, 0.110, (0.09, 0.127)),  # gaps and experts assumed
    },
)
PCIE4 = Machine(
    0.378,
    {
        1: Rows((8, 0.47), 0.244, 0.488, 0.25, 0.12, (0.11, 0.124)),
        2: Rows((16, 0.56), 0.276, 0.552, 0.25, 0.15, (0.11, 0.124)),
        4: Rows((28, 0.685), 0.381, 0.762, 0.25, 0.20, (0.11, 0.124)),
    },
)
"""Gaps by what a step takes beside its experts on an RTX 3090 (12.8, 14.5 and 20 ms;
0xSero/glm53-flash-offload),
here twice as long with a latent attention; its CPU; experts in VRAM and behind copies assumed."""
MACHINES = {"h200": H200, "pcie4": PCIE4}


@dataclass(frozen=True, slots=True)
class Found:
    """Of steps: tok_s of all rows together, step_ms. Of layers: tail_us that fetches still take at a plan,
    wait_us for the CPU. Experts a step: own copies, on the CPU, fetched, of these right. link: share of the
    time in which it is busy."""

    tok_s: float
    step_ms: float
    tail_us: float
    wait_us: float
    own: float
    cpu: float
    fetched: float
    right: float
    link: float


class Costs:
    """The split's idea of both lanes, fitted to layers as they come."""

    def __init__(self, copy_ms: float, cpu: tuple[float, float]) -> None:
        self._cpu_fixed, self._cpu_expert = cpu[0] + HAND_OVER_MS, cpu[1]
        sizes = np.array([[1.0, 1], [1, 2], [1, 4], [1, 8]])
        start = np.array([0.03, GATHER_SHARE * copy_ms])
        self._squares, self._times = sizes.T @ sizes / 2, sizes.T @ (sizes @ start) / 2
        self._fixed, self._own = start.tolist()
        self._table: dict[int, float] = {}

    def observe(self, num_own: float, elapsed_ms: float) -> None:
        """Take a layer: experts copied, and ms from its plan to its last expert."""
        fade, features = 1 - 1 / MEMORY_LAYERS, np.array([1.0, num_own])
        self._squares = fade * self._squares + np.outer(features, features)
        self._times = fade * self._times + features * elapsed_ms

    def renew(self) -> None:
        """Decide by what was observed from now on."""
        found = np.maximum(np.linalg.solve(self._squares, self._times), 0.001)
        self._fixed, self._own = found.tolist()
        self._table.clear()

    def for_cpu(self, misses: int) -> float:
        """Give how many of so many misses the CPU takes: what makes the slower lane fastest."""
        if misses not in self._table:
            parts = np.arange(misses * PARTS + 1)
            share = parts % PARTS
            allowed = (share == 0) | ((share >= LEAST_PARTS) & (share <= PARTS - LEAST_PARTS))
            cpu_ms = np.where(parts, self._cpu_fixed + self._cpu_expert * parts / PARTS, 0.0)
            gpu_ms = self._fixed + self._own * (misses - parts / PARTS)
            slower = np.where(allowed, np.maximum(cpu_ms, gpu_ms), np.inf)
            self._table[misses] = float(parts[int(np.argmin(slower))]) / PARTS
        return self._table[misses]


def share_link(fetches: Sequence[float], own: float, copy_ms: float) -> tuple[float, float]:
    """Give when a layer's own copies are done, and when what is left of the fetches is, in ms from its plan.

    fetches: what is left of each, in experts. Both share the link by halves while both want it.
    """
    left = sum(fetches)
    both = min(left, own)
    shared_ms = 2 * both * BOTH_SHARE * copy_ms
    own_ms = shared_ms + (own - both) * GATHER_SHARE * copy_ms
    return own_ms if own else 0.0, shared_ms + (left - both) * copy_ms if left else 0.0


def play(machine: Machine, num_rows: int, ahead: tuple[int, int], steps: int = 240, seed: int = 0) -> Found:
    """Play so many steps, of which the second half counts. ahead: plain, across a latent attention."""
    rows, copy_ms = machine.rows[num_rows], machine.copy_ms
    rng, costs = np.random.default_rng(seed), Costs(copy_ms, rows.cpu)
    fetches: list[tuple[float, bool]] = []  # what is left of each, and whether it is right
    sums = np.zeros(8)
    for step in range(steps):
        if step == steps // 2:
            sums[:] = 0
        for layer in range(LAYERS):
            num_right = sum(is_right for _, is_right in fetches)
            misses = max(0, int(rng.binomial(*rows.misses)) - num_right)
            on_cpu = costs.for_cpu(misses)
            own = misses - on_cpu
            tail = sum(left for left, _ in fetches)
            own_ms, fetched_ms = share_link([left for left, _ in fetches], own, copy_ms)
            ready_ms = max(own_ms, fetched_ms, rows.hits)
            experts_ms = ready_ms + (rows.last if own or num_right else 0.0)
            costs.observe(own, experts_ms)
            job_ms = rows.cpu[0] + rows.cpu[1] * on_cpu if on_cpu else 0.0
            cpu_ms = job_ms * float(np.exp(rng.normal(0, CPU_SPREAD))) + HAND_OVER_MS * (on_cpu > 0)
            is_last, is_across = layer == LAYERS - 1, layer % ACROSS_EVERY == ACROSS_EVERY - 1
            end_ms = max(experts_ms, cpu_ms) + 0.012
            next_ms = end_ms + (rows.across if is_across else rows.gap) + (HEAD_MS if is_last else 0.0)
            begin_ms = max(max(own_ms, GUESS_MS) + ORDER_MS, fetched_ms)
            num_ahead = 0 if is_last else ahead[is_across]
            idle = max(0.0, next_ms - begin_ms) / copy_ms  # copies that fit before the next plan
            done = [min(1.0, max(0.0, idle - number)) for number in range(num_ahead)]
            sums += (
                next_ms,
                tail * copy_ms,
                max(0.0, cpu_ms - experts_ms),
                own,
                on_cpu,
                len(fetches),
                num_right,
                max(own_ms, fetched_ms) + sum(done) * copy_ms,
            )
            fetches = [(1 - part, rng.random() < RECALL[number]) for number, part in enumerate(done)]
        if step % STEPS_A_TABLE == STEPS_A_TABLE - 1:
            costs.renew()
    total, tail, wait, own, on_cpu, fetched, right, busy = (sums / (steps - steps // 2)).tolist()
    a_layer = 1e3 / LAYERS
    return Found(
        tok_s=1e3 * num_rows / total,
        step_ms=total,
        tail_us=tail * a_layer,
        wait_us=wait * a_layer,
        own=own,
        cpu=on_cpu,
        fetched=fetched,
        right=right,
        link=busy / total,
    )


def parse_ahead(text: str) -> tuple[int, int]:
    """Read 1/2. Raises BadInput."""
    plain, slash, across = text.partition("/")
    try:
        found = int(plain), int(across if slash else plain)
    except ValueError as error:
        raise BadInput(f"--ahead {text}: not two numbers as in 1/2") from error
    if not all(0 <= number <= len(RECALL) for number in found):
        raise BadInput(f"--ahead {text}: from 0 to {len(RECALL)}")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises BadInput."""
    parser = argparse.ArgumentParser(prog="python -m bench.lanes_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--machine", choices=sorted(MACHINES), default="h200")
    parser.add_argument("--copy-ms", type=float, help="one expert by the copy engine, not the machine's")
    parser.add_argument("--rows", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--ahead", nargs="+", default=["0/0", "1/1", "1/2", "2/2", "2/3", "3/3"])
    parser.add_argument("--steps", type=int, default=240, help="half of them count")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(argv)
    machine = MACHINES[given.machine]
    if given.copy_ms is not None:
        if not given.copy_ms > 0:
            raise BadInput(f"--copy-ms {given.copy_ms}: a copy takes some time")
        machine = replace(machine, copy_ms=given.copy_ms)
    if given.steps < 2 * STEPS_A_TABLE:
        raise BadInput(f"--steps {given.steps}: at least {2 * STEPS_A_TABLE}")
    ahead = [parse_ahead(text) for text in given.ahead]
    found = {
        f"{rows} {plain}/{across}": asdict(play(machine, rows, (plain, across), given.steps))
        for rows in given.rows
        for plain, across in ahead
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    names = list(next(iter(found.values())))
    print("rows ahead  " + "".join(f"{name:>9}" for name in names))
    for label, figures in found.items():
        print(f"{label:<12}" + "".join(f"{value:9.2f}" for value in figures.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
