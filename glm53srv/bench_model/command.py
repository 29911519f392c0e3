"""Runs `glm53srv bench-model`: builds the engine around the drawn model and measures it."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from glm53srv.bench_model.driver import Driver, TimedModel
from glm53srv.bench_model.guesses import guess_routes
from glm53srv.bench_model.measures import (
    measure_beside,
    measure_decode,
    measure_prefill,
    peak_rss_gib,
    soak,
)
from glm53srv.bench_model.options import BenchOptions
from glm53srv.bench_model.routes import generate, route_model
from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.imposed_routes import ImposedRoutes
from glm53srv.engine.cuda.loading import CudaOptions, LoadedModel, limit_vram
from glm53srv.engine.cuda.package import open_package
from glm53srv.engine.cuda.synthetic_model import load_synthetic
from glm53srv.engine.cuda.synthetic_plan import device_bytes
from glm53srv.engine.sampler import SamplerBank
from glm53srv.machine import GIB, MachineFacts
from glm53srv.model.config import ModelConfig
from glm53srv.offload.calibrate import describe
from glm53srv.offload.device.cpus import choose_cpus
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.vram_plan import VramOptions, explain

logger = logging.getLogger(__name__)

SHORT_PROMPTS = (96, 256, 1024)
MAX_STREAMS = 4
TRACE_TOKENS = 1024
"""Tokens of a stream until its routes come round again: more than warm and timed steps of the defaults."""
REPEATED_UP_TO = 8192
"""Tokens of the longest prompt that is run twice."""

Say = Callable[[str], None]


def run_bench(options: BenchOptions, machine: MachineFacts, say: Say) -> dict[str, Any]:
    """Measure; gives all numbers, and writes them to options.out as they come.

    say: takes a line per figure. Raises MachineError. An interrupt ends it with the numbers so far.
    """
    results: dict[str, Any] = {
        "options": {name: str(value) for name, value in asdict(options).items()},
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as directory:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                _run(options, machine, Path(directory), results, say)
        finally:
            _save(options, results)
    return results


def _run(
    options: BenchOptions, machine: MachineFacts, work_dir: Path, results: dict[str, Any], say: Say
) -> None:
    engine, model, results["load"], routes = build_engine(options, machine, work_dir, say)
    results["device"] = torch.cuda.get_device_name()
    try:
        measure(options, engine, model, results, say, routes)
    finally:
        engine.close()


def measure(
    options: BenchOptions,
    engine: CudaEngine,
    model: TimedModel,
    results: dict[str, Any],
    say: Say,
    routes: ImposedRoutes | None,
) -> None:
    """Measure a warm engine as the options say, into results. routes: as build_engine gave them."""
    driver = Driver(engine, routes=routes)
    _save(options, results)
    for width in options.streams:
        found = measure_decode(driver, engine, width, options.warm_steps, options.steps, model.enqueue_s)
        results[f"decode_{width}"] = found
        say(f"decode {width}: {_line(found)}")
        _save(options, results)
    for length in SHORT_PROMPTS:
        results[f"first_token_{length}_s"] = times = measure_prefill(driver, length, 3)
        say(f"first token of {length} tokens: {[round(value, 3) for value in times]} s")
    for length in options.prefill_tokens:
        times = measure_prefill(driver, length, 2 if length <= REPEATED_UP_TO else 1)
        results[f"prefill_{length}_tok_s"] = [length / value for value in times]
        say(f"prefill of {length}: {[round(length / value) for value in times]} tok/s")
        _save(options, results)
    if options.beside_tokens:
        results["beside"] = found = measure_beside(driver, options.beside_tokens, options.beside_layers)
        say(f"beside a prefill: {_line(found)}")
    if options.soak_s:
        results["soak"] = found = soak(driver, engine, options.soak_s)
        say(f"mixed load: {_line(found)}")
    results["checked_slots"] = engine.check_slots(64, seed=9)
    results["counts"] = asdict(engine.offload.counts)
    results["peak_rss_gib"] = peak_rss_gib()
    results["peak_vram_gib"] = torch.cuda.max_memory_reserved() / GIB
    free, total = torch.cuda.mem_get_info()  # of the card, so with what torch does not know of
    results["card_used_gib"] = (total - free) / GIB
    results["vram_held_gib"] = torch.cuda.memory_reserved() / GIB
    if engine.offload.lane is not None:
        crew = engine.offload.lane.stats()
        results["crew"] = asdict(crew) | {"ms_per_expert": crew.ms_per_expert}
    say(
        f"peak RAM {results['peak_rss_gib']:.1f} GiB, peak VRAM of torch {results['peak_vram_gib']:.1f} GiB, "
        f"now {results['vram_held_gib']:.1f}, used on the card {results['card_used_gib']:.1f}"
    )


def build_engine(
    options: BenchOptions,
    machine: MachineFacts,
    work_dir: Path,
    say: Say,
    make_sampler: Callable[[ModelConfig], SamplerBank] | None = None,
) -> tuple[CudaEngine, TimedModel, dict[str, Any], ImposedRoutes | None]:
    """Load and warm up the drawn model; gives the engine, what that took, and whose routes it follows.

    make_sampler: for the model's configuration; by default every id may be drawn, and nothing constrained.
    """
    cpus = choose_cpus(options.cpus, machine)
    threads = 0 if options.mode == "exact" else options.threads or len(cpus)
    cuda = _cuda_options(options, cpus, threads)
    begin = time.perf_counter()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[f"{name}_s"] = time.perf_counter() - begin
        say(f"{name} after {marks[f'{name}_s']:.1f} s")

    package = open_package(cuda.mode, cuda.tuning_dir)
    limit_vram(cuda)
    mark("imported")
    loaded = load_synthetic(package, cuda, work_dir, options.layers, lambda part, stage: None)
    config, arena = loaded.config, loaded.arena
    mark("loaded")
    say(
        f"{config.num_layers} layers: experts of {arena.region.num_bytes / GIB:.1f} GiB in host memory, "
        f"{device_bytes(config) / GIB:.2f} GiB of other weights on the card"
    )
    routes = _impose_routes(loaded, options.guess_recall) if options.routes == "published" else None
    model: Any = TimedModel(loaded.model, None if routes is None else routes.send_ahead)
    make_sampler = make_sampler or (lambda drawn: SamplerBank(drawn.vocab_size, drawn.eos_token_ids))
    sampler = make_sampler(config)
    try:
        engine = CudaEngine.open(replace(loaded, model=model), sampler, cuda)
    except BaseException:
        arena.close()
        raise
    mark("opened")
    if routes is not None:
        engine.offload.look_ahead.impose(routes.guesses_of_step)
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    mark("warm")
    if options.graphs and not engine.captured_widths:
        say("decode steps could not be captured: these are figures without CUDA graphs")
    calibration = engine.offload.calibration
    for line in (*explain(engine.offload.plan), *describe(calibration, arena.layout.record_bytes)):
        say(line)
    facts = {
        **marks,
        "threads": threads,
        "captured_widths": engine.captured_widths,
        "slots": engine.offload.plan.num_slots,
        "calibration": asdict(calibration),
        "chunk_tokens": engine.limits.max_chunk_tokens,
    }
    return engine, model, facts, routes


def _impose_routes(loaded: LoadedModel, recall: float) -> ImposedRoutes:
    """Let decode steps follow traces with the published skew and locality, one for each stream.

    recall: of the guesses that are made of them, one layer early.
    """
    geometry = loaded.arena.geometry
    drawn = route_model()
    traces = [
        generate(TRACE_TOKENS, seed=stream, model=drawn)[:, : geometry.num_layers]
        for stream in range(MAX_STREAMS)
    ]
    guesses = [guess_routes(trace, recall, seed=stream) for stream, trace in enumerate(traces)]
    routes = ImposedRoutes(traces, MAX_STREAMS, loaded.device, guesses)
    routes.impose(loaded.layers)
    return routes


def _cuda_options(options: BenchOptions, cpus: tuple[int, ...], threads: int) -> CudaOptions:
    offload = OffloadOptions(
        mode=options.mode,
        vram=VramOptions(
            options.reserve_gib, max_slots=options.max_slots, landing=options.landing, ahead=options.ahead
        ),
        residency=ResidencyParams(num_offers=options.offers),
        crew_threads=threads,
        crew_cpus=cpus,
        cpu_prefill_tokens=options.ct_prefill,
        splits_experts=options.ct_split == "parts",
        chunk_slots=options.chunk_slots,
    )
    return CudaOptions(
        offload,
        cache_tokens=options.cache_tokens,
        vram_bytes=int(options.vram_gib * GIB) if options.vram_gib else None,
        max_chunk_tokens=options.chunk_tokens,
        tuning_dir=options.tuning_dir,
        graphs=options.graphs,
        whole_cache=options.whole_cache,
    )


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


def _save(options: BenchOptions, results: dict[str, Any]) -> None:
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
