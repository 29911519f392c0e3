"""`python -m bench.offload_policy`: host time of the offload policy between two steps. Aim: under 2 ms.

One step is what the engine thread does while the device runs: read the routing log of 42 layers and up to
four streams (observe), decide (advance), and make the tables for the device (slots, heat). The split rule
runs on the device; its numpy form is timed too, since the simulated device uses it. Times are the thread's
own CPU time: other processes on the machine do not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Sequence

import numpy as np

from glm53srv.bench_model.routes import generate, route_model
from glm53srv.offload.cost import cpu_count_table, default_costs
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.split import split_picks


def time_steps(num_streams: int, num_slots: int, num_steps: int) -> dict[str, list[float]]:
    """Return milliseconds of each part for each step after the first 50."""
    model = route_model()
    streams = [generate(num_steps, seed=seed, model=model) for seed in range(num_streams)]
    picks = np.concatenate(streams, axis=2).astype(np.int32)
    policy = ResidencyPolicy(ExpertGeometry(), num_slots)
    counts = cpu_count_table(default_costs(22), picks.shape[2], "fast")
    empty = np.empty(0, np.int32)
    landing = [empty, empty]
    spent: dict[str, list[float]] = {"observe": [], "advance": [], "tables": [], "host": [], "split": []}
    for t in range(num_steps):
        clock = [time.thread_time()]
        policy.observe(picks[t])
        clock.append(time.thread_time())
        update = policy.advance(landing.pop(0), 25)
        clock.append(time.thread_time())
        table, heat = policy.table(), policy.heat_table()
        clock.append(time.thread_time())
        split_picks(picks[t], table, heat, counts)
        clock.append(time.thread_time())
        landing.append(update.copy_slots)
        if t >= 50:
            parts = [1000.0 * (end - begin) for begin, end in itertools.pairwise(clock)]
            row = (*parts[:3], sum(parts[:3]), parts[3])
            for name, value in zip(spent, row, strict=True):
                spent[name].append(value)
    return spent


def main(argv: Sequence[str] | None = None) -> int:
    """Print median, 99th percentile and maximum of each part."""
    parser = argparse.ArgumentParser(description="Host time of the offload policy between two steps.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--slots", type=int, default=1376, help="a 24 GB card; 12096 = every expert fits")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args(argv)
    result: dict[str, dict[str, list[float]]] = {}
    for num_streams in (1, 4):
        spent = time_steps(num_streams, args.slots, args.steps)
        result[str(num_streams)] = {
            name: [float(np.median(v)), float(np.percentile(v, 99)), max(v)] for name, v in spent.items()
        }
    if args.json:
        print(json.dumps({"machine": platform.processor(), "slots": args.slots, "ms": result}))
        return 0
    print(f"{args.slots} slots, {args.steps} steps; milliseconds: median, 99th percentile, maximum")
    for streams, parts in result.items():
        for name, values in parts.items():
            print(f"{streams} streams  {name:8s}" + "".join(f"{value:8.3f}" for value in values))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
