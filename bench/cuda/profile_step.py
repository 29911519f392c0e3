"""Say where a decode step's and a prefill chunk's time goes: kernels, copies, and the gaps between them.

    python -m bench.cuda.profile_step --mode fast --layers 15

Takes the options of `glm53srv bench-model`, and --measure to do first what that does, and then profile steps
of the first width alone; --out NAME writes a
trace of each to NAME.*.json.gz. Runs steps of each width, and the first prompt, under the profiler of torch
and adds up intervals of the device: compute (kernels), copies, both at once, neither. "neither" is the device
waiting for the host.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.cuda.intervals import Interval, lanes_of
from glm53srv.bench_model.command import build_engine, measure
from glm53srv.bench_model.driver import Driver
from glm53srv.bench_model.options import parse_options
from glm53srv.engine.cuda.synthetic_plan import require_host_memory
from glm53srv.machine import read_machine
from glm53srv.model.published_files import published_model


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def profile(what: str, work: Callable[[], Any], num_steps: int, trace: Path | None) -> None:
    """Run work under the profiler and print its lanes and its longest kernels, per step.

    trace: where the events go for a viewer of Chrome traces, None for nowhere.
    """
    # Without the host's side: following it would slow down what feeds the device.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            work()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace.with_suffix(f".{what.replace(' ', '_')}.json.gz")))
    kernels: list[Interval] = []
    copies: list[Interval] = []
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        interval = (float(event.time_range.start), float(event.time_range.end))
        is_copy = event.name.startswith(("Memcpy", "Memset"))
        (copies if is_copy else kernels).append(interval)
        by_name[event.name].append(interval[1] - interval[0])
    lanes = lanes_of(kernels, copies)
    say(
        f"{what}: {lanes.span / 1e3 / num_steps:.1f} ms, kernels {lanes.compute / lanes.span:.0%}, copies "
        f"{lanes.copies / lanes.span:.0%}, both {lanes.both / lanes.span:.0%}, neither "
        f"{lanes.neither / lanes.span:.0%}"
    )
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:18]:
        say(f"    {sum(times) / 1e3 / num_steps:9.2f} ms {len(times) / num_steps:8.1f} x  {name[:88]}")


def main(argv: list[str]) -> int:
    options, machine = parse_options([word for word in argv if word != "--measure"]), read_machine()
    require_host_memory(published_model(options.layers), machine)
    with tempfile.TemporaryDirectory() as directory:
        engine, model, facts, routes = build_engine(options, machine, Path(directory), say)
        if "--measure" in argv:
            measure(options, engine, model, {"load": facts}, say, routes)
        driver = Driver(engine, routes=routes)
        is_warm = "--measure" in argv
        for width in options.streams[:1] if is_warm else options.streams:
            slots = list(range(width))
            for slot in slots:
                driver.prefill_s(slot, 96)
            for _ in range(20 if is_warm else options.warm_steps):
                driver.step(decode=slots)
            begin = time.perf_counter()
            for _ in range(options.steps):
                driver.step(decode=slots)
            step_ms = (time.perf_counter() - begin) / options.steps * 1e3
            say(f"decode of {width} without the profiler: {step_ms:.2f} ms a step")
            profile(f"decode of {width}", functools.partial(driver.step, decode=slots), 8, options.out)
            driver.step(release=slots)
        for length in options.prefill_tokens[:1]:
            driver.prefill_s(0, length)
            driver.step(release=[0])
            profile(f"prefill of {length}", functools.partial(driver.prefill_s, 0, length), 1, options.out)
            driver.step(release=[0])
        engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
