"""Decode under several settings within one start, in turn, so that they can be compared.

    python -m bench.cuda.variants --mode fast --vary base: 'avx512: isa=AVX512' base:

Starts of one kind of machine differ by a fifth; this loads the model once. Takes the options of
`glm53srv bench-model`, then --vary with a name and settings each:

    landing=N              from 1 on, as of bench-model, at most what the start had
    ahead=N across=N       from 0 on: experts fetched ahead of their layer in a step of one row, one more in
                           others; across: of a layer behind a latent attention, as many by default; exactly
                           so many, where without both the gaps between layers decide, too
    copies=PxWxI           the kernel that copies a layer's experts: programs, warps, words at once of each
    isa=NAME threads=N     of the CPU workers, which are started anew
    split=NAME             parts or whole, as --ct-split of bench-model
    launches=N             of a layer's experts: 2, those in VRAM beside the copies of the others, or 1
    byrow=N                attention of up to so many rows is called row by row, of more in one call
    pieces=N               1: experts in VRAM are summed in fewer pieces than others; 0: in as many
    overlap=N              1: hits that are computed beside copies cost nothing in the split; 0: they add up
    full=N                 1: the KV cache has the memory of a full one, experts what is left; 0: of what it
                           holds
    gates=N                1: a KDA layer's gates beside its projection; 0: behind it
    a=MS b=MS tzc=MS       pin a cost of the split: per CPU job, per expert of it, per expert over the link
    streams=1+2+4          in place of the options' streams
    prompts=24+96          in place of steps: the first token of prompts of so many tokens, three of each
    cpuprompt=N            in place of the options' --ct-prefill, at most that

Steps are captured anew for each. The cache stays as the one before left it, so name the first variant again
at the end. --out NAME keeps a trace of each variant's first width as NAME.VARIANT.json.gz, and all figures
as NAME.json. Needs the engine's graphs.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.cuda.profile_step import say
from bench.errors import BadInput
from bench.mailbox import read_rate
from bench.profile import cut_steps, read_events, summarize
from glm53srv.bench_model.command import build_engine
from glm53srv.bench_model.driver import Driver
from glm53srv.bench_model.measures import measure_decode, measure_prefill
from glm53srv.bench_model.options import BenchOptions, parse_options
from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.synthetic_plan import require_host_memory
from glm53srv.errors import Glm53Error
from glm53srv.kernels import Isa
from glm53srv.machine import MachineFacts, read_machine
from glm53srv.model.published_files import published_model
from glm53srv.offload.cost import COST_NAMES, CostOverrides
from glm53srv.offload.device.cpus import choose_cpus
from glm53srv.offload.device.gpu.copy_kernel import USUAL, CopyShape

PROFILED_STEPS = 8
PROMPTS = 3
"""Of each length."""
READ_BYTES = 4 * 10**9
"""Of host memory, to see what it gives on this start: link and CPU workers share it."""
SPLITS = ("parts", "whole")
NUMBERS = {
    "landing": 1,
    "ahead": 0,
    "across": 0,
    "threads": 1,
    "launches": 1,
    "gates": 0,
    "byrow": 0,
    "overlap": 0,
    "full": 0,
    "pieces": 0,
    "cpuprompt": 0,
}
"""With the least that each may be. Offers keep their number: residency cannot change its mind about them."""
COSTS = {"a": "cpu_fixed_ms", "b": "cpu_expert_ms", "tzc": "zero_copy_ms"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One --vary. numbers: by their names in NUMBERS; costs: in CostOverrides. copies, isa, streams, split:
    None for the usual or the options'. split: parts or whole, None for the options'."""

    name: str
    numbers: dict[str, int]
    costs: dict[str, float]
    copies: CopyShape | None
    isa: Isa | None
    streams: tuple[int, ...] | None
    split: str | None
    prompts: tuple[int, ...] | None


def parse_shape(text: str) -> CopyShape:
    """Read programs x warps x words of a copy, as in 8x8x4096. Raises ValueError."""
    numbers = [int(part) for part in text.split("x")]
    if len(numbers) != 3:
        raise ValueError(f"{text!r} is not programs x warps x words, as in 8x8x4096")
    programs, warps, items = numbers
    if programs < 1 or any(each < 1 or each & (each - 1) for each in (warps, items)):
        raise ValueError(f"{text!r}: a copy needs a program, and powers of two behind that")
    return CopyShape(programs, warps, items)


def parse_variant(text: str) -> Variant:
    """Read 'name: key=value, ...'. Raises BadInput."""
    name, _, rest = text.partition(":")
    numbers: dict[str, int] = {}
    costs: dict[str, float] = {}
    copies, isa, streams, split, prompts = None, None, None, None, None
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, _, value = pair.partition("=")
        try:
            if key in NUMBERS:
                numbers[key] = int(value)
                if numbers[key] < NUMBERS[key]:
                    raise BadInput(f"--vary {text!r}: {key} is at least {NUMBERS[key]}")
            elif key == "copies":
                copies = parse_shape(value)
            elif key in COSTS:
                costs[COSTS[key]] = float(value)
            elif key == "isa":
                isa = Isa[value]
            elif key == "split":
                split = SPLITS[SPLITS.index(value)]
            elif key == "streams":
                streams = tuple(int(width) for width in value.split("+"))
            elif key == "prompts":
                prompts = tuple(int(tokens) for tokens in value.split("+"))
            else:
                raise BadInput(f"--vary {text!r}: no setting {key!r}")
        except (ValueError, KeyError) as error:
            raise BadInput(f"--vary {text!r}: {pair!r} cannot be read: {error}") from error
    if not name.strip():
        raise BadInput(f"--vary {text!r}: a variant needs a name, as in 'base:'")
    return Variant(name.strip(), numbers, costs, copies, isa, streams, split, prompts)


class Bench:
    """A running engine whose settings change."""

    def __init__(self, options: BenchOptions, engine: CudaEngine, model: Any, routes: Any) -> None:
        self.options, self.engine, self.model = options, engine, model
        self.driver = Driver(engine, routes=routes)
        self._landing, self._ahead = engine.offload.layers.landing, engine.offload.look_ahead.num_ahead
        self._most_by_row = engine.most_by_row

    def apply(self, variant: Variant) -> None:
        """Set everything as the variant says, what it does not name as at the start."""
        engine, numbers = self.engine, variant.numbers
        offload = engine.offload
        landing = min(numbers.get("landing", self._landing.num_experts), self._landing.num_experts)
        offload.layers.landing = replace(self._landing, num_experts=landing)
        offload.look_ahead.limit(numbers.get("ahead", self._ahead), numbers.get("across"))
        offload.tunes_ahead = not {"ahead", "across"} & set(numbers)
        offload.layers.copy_shape = variant.copies or USUAL
        offload.layers.split_launches(numbers.get("launches", 2) > 1)
        offload.counts_overlap = numbers.get("overlap", 1) > 0
        most = self.options.ct_prefill
        offload.cpu_prefill_tokens = min(most, numbers.get("cpuprompt", most))
        with torch.inference_mode():  # as in a step
            engine.pages.hold(engine.limits.num_pages if numbers.get("full", 0) else 0)
            engine.pages.shrink()
        engine.most_by_row = numbers.get("byrow", self._most_by_row)
        maker = engine._loaded.layers[0].maker
        if maker is not None:
            maker.cuts_first_less = numbers.get("pieces", 1) > 0
        self.model.gates.is_on = numbers.get("gates", 1) > 0
        isa = (variant.isa or Isa.AUTO).name
        engine.change_workers(isa, numbers.get("threads"), CostOverrides(**variant.costs))
        offload.share_experts((variant.split or self.options.ct_split) == "parts")
        engine.capture()
        if self.options.graphs and not engine.captured_widths:
            # The engine goes on without graphs, which is right for a server and wrong for a comparison.
            raise BadInput(f"{variant.name}: decode steps could not be captured, see the log")

    def measure(self, variant: Variant, trace: Path) -> dict[str, Any]:
        """Time steps of each width, profile those of the first one into trace."""
        found: dict[str, Any] = {}
        if variant.prompts is not None:
            for num_tokens in variant.prompts:
                found[f"prompt_{num_tokens}"] = self._time_prompts(variant.name, num_tokens)
            return found
        widths = variant.streams or self.options.streams
        for width in widths:
            before = self.engine.offload.counts.frozen()
            enqueue_s = self.model.enqueue_s
            warm, steps = self.options.warm_steps, self.options.steps
            figures = measure_decode(self.driver, self.engine, width, warm, steps, enqueue_s)
            after = self.engine.offload.counts.frozen()
            done = max(1, after.num_steps - before.num_steps)
            for name in ("gpu_lane_ms", "cpu_wait_ms", "num_cpu_last"):
                figures[name] = (getattr(after, name) - getattr(before, name)) / done
            lane = self.engine.offload.lane
            figures["hand_over_ms"] = 0.0 if lane is None else lane.hand_over.value_ms
            found[f"decode_{width}"] = figures
            say(f"{variant.name} x{width}: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()))
        report = self.engine.offload.report
        if report is not None:
            found["costs"] = {name: getattr(report.costs.now, name) for name in COST_NAMES}
            say(f"    costs {found['costs']}")
        if widths[0] in self.engine.captured_widths:
            found["parts"] = self._profile(widths[0], trace)
        return found

    def _time_prompts(self, name: str, num_tokens: int) -> dict[str, Any]:
        lane = self.engine.offload.prefill_lane
        before = asdict(lane.work)
        found: dict[str, Any] = {"first_token_s": measure_prefill(self.driver, num_tokens, PROMPTS)}
        found |= {key: (value - before[key]) / PROMPTS for key, value in asdict(lane.work).items()}
        say(f"{name} p{num_tokens}: {found}")
        return found

    def _profile(self, width: int, trace: Path) -> dict[str, float]:
        slots = list(range(width))
        for slot in slots:
            self.driver.prefill_s(slot, 96)
        step = functools.partial(self.driver.step, decode=slots)
        for _ in range(10):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
        self.driver.step(release=slots)
        span, rows = summarize(cut_steps(read_events(trace)))
        say(f"    traced step {span:.2f} ms: " + ", ".join(f"{row.part} {row.ms:.2f}" for row in rows))
        return {"step": span} | {row.part: row.ms for row in rows}


def run(
    argv: Sequence[str], options: BenchOptions, machine: MachineFacts, variants: Sequence[Variant]
) -> None:
    """Load the model and measure each variant. Raises BadInput for one whose steps cannot be captured."""
    results: dict[str, Any] = {"command": list(argv)}
    with tempfile.TemporaryDirectory() as directory:
        engine, model, results["load"], routes = build_engine(options, machine, Path(directory), say)
        try:
            bench = Bench(options, engine, model, routes)
            cpus = choose_cpus(options.cpus, machine)
            records = engine.offload.arena.records.reshape(-1)[:READ_BYTES]
            results["host_read_gb_s"] = read_rate(records, cpus)
            say(f"host memory: {len(cpus)} threads that only read get {results['host_read_gb_s']:.0f} GB/s")
            for number, variant in enumerate(variants):
                label = f"{number}.{variant.name}"
                name = f"{label}.json.gz"
                where = Path(directory) / name if options.out is None else Path(f"{options.out}.{name}")
                bench.apply(variant)
                results[label] = bench.measure(variant, where)
                if options.out is not None:
                    Path(f"{options.out}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        finally:
            engine.close()


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit code."""
    try:
        own = list(itertools.takewhile(lambda word: word != "--vary", argv))
        variants = [parse_variant(text) for text in argv[len(own) + 1 :]]
        if not variants:
            raise BadInput("name variants behind --vary, the last option")
        options, machine = parse_options(own), read_machine()
        require_host_memory(published_model(options.layers), machine)
        run(argv, options, machine, variants)
    except (BadInput, Glm53Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
