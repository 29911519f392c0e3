"""Measure the CUDA engine at the real model's dimensions on random weights, within a share of the card.

    python -m bench.cuda.full_size --config DIR --mode exact --vram 24 --out result.json
    python -m bench.cuda.full_size --config DIR --mode fast --layers 15 --soak 60

DIR holds the published model's config.json and generation_config.json. Nothing else is read: weights are
drawn (glm53srv/engine/cuda/synthetic.py). --layers takes the first N of the model's, for hosts with less RAM.
Each figure comes from engine steps, without HTTP. Prints a table, and writes all numbers as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm53srv.engine.base import DecodeRow, PrefillSlice, SequenceStart, StepPlan
from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.loading import CudaOptions, limit_vram, load_model
from glm53srv.engine.cuda.package import open_package
from glm53srv.engine.cuda.synthetic import SyntheticTensors, fill_arena, model_bytes
from glm53srv.engine.sampler import SamplerBank
from glm53srv.machine import read_machine
from glm53srv.model.config import load_model_config
from glm53srv.model.pack_config import processor_json
from glm53srv.offload.calibrate import describe
from glm53srv.offload.device.arena import ArenaOptions
from glm53srv.offload.device.cpus import choose_cpus
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.vram_plan import GIB, VramOptions, explain
from glm53srv.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SHORT_PROMPTS = (96, 256, 1024)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_model_dir(source: Path, target: Path, num_layers: int | None) -> None:
    """Write the files that both readers of a configuration want, cut to num_layers."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            if name in text:
                text[name] = text[name][:num_layers]
        linear = text["linear_attn_config"]
        for name in linear.keys() & {"full_attn_layers", "kda_layers"}:
            linear[name] = [layer for layer in linear[name] if layer < num_layers]
    text["num_nextn_predict_layers"] = 0
    # The published configuration is that of the bf16 form; this is what its quantised checkpoint adds.
    config.setdefault("quantization_config", {"quant_method": "exl3", "bits": 3.05, "codebook": "mul1"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "processor_config.json").write_text(json.dumps(processor_json()), encoding="utf-8")
    shutil.copy(source / "generation_config.json", target)
    header = b'{"__metadata__":{"format":"pt"}}'
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


class Bench:
    """An engine and the streams that are run on it."""

    def __init__(self, engine: CudaEngine) -> None:
        self.engine = engine
        self.depth = engine.limits.num_layers
        self._step = 0
        self._rng = np.random.default_rng(0)
        self.positions: dict[int, int] = {}
        self._share = engine.limits.num_pages // engine.limits.max_streams
        self.enqueue_s: list[float] = []
        self._time_enqueueing()

    def _time_enqueueing(self) -> None:
        """Note how long the host takes to enqueue a decode step's kernels: the floor of a step's time."""
        model: Any = self.engine._model
        stock = model.decode

        def decode(*arguments: Any) -> torch.Tensor:
            begin = time.perf_counter()
            logits = stock(*arguments)
            self.enqueue_s.append(time.perf_counter() - begin)
            return logits

        model.decode = decode

    def step(self, **parts: Any) -> Any:
        self._step += 1
        return self.engine.step(StepPlan(self._step, **parts))

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, 150_000, count).tolist())

    def pages(self, slot: int) -> tuple[int, ...]:
        return tuple(range(slot * self._share, (slot + 1) * self._share))

    def pieces(self, slot: int, num_tokens: int, layers: int | None = None) -> list[PrefillSlice]:
        ids, chunk = self.tokens(num_tokens), self.engine.limits.max_chunk_tokens
        stride = layers or self.depth
        self.positions[slot] = num_tokens
        return [
            PrefillSlice(
                slot,
                ids[begin : begin + chunk],
                begin,
                self.pages(slot),
                first,
                min(self.depth, first + stride),
                begin + chunk >= num_tokens,
                SequenceStart(f"s{slot}", GREEDY, 0, ids) if begin == first == 0 else None,
            )
            for begin in range(0, num_tokens, chunk)
            for first in range(0, self.depth, stride)
        ]

    def prefill_s(self, slot: int, num_tokens: int) -> float:
        """Time a prompt from its first slice to its first token."""
        pieces = self.pieces(slot, num_tokens)
        begin = time.perf_counter()
        for piece in pieces:
            self.step(prefill=piece)
        return time.perf_counter() - begin

    def rows(self, slots: Sequence[int]) -> tuple[DecodeRow, ...]:
        rows = []
        for slot in slots:
            rows.append(DecodeRow(slot, self.tokens(1)[0], self.positions[slot], self.pages(slot)))
            self.positions[slot] += 1
        return tuple(rows)

    def decode(self, slots: Sequence[int]) -> Any:
        """Run one step of these streams."""
        return self.step(decode=self.rows(slots))

    def release(self, *slots: int) -> None:
        self.step(release=slots)


def measure_decode(bench: Bench, width: int, warm_steps: int, steps: int) -> dict[str, float]:
    """Decode `width` streams until the cache has settled, then time steps."""
    slots = list(range(width))
    for slot in slots:
        bench.prefill_s(slot, 96)
    for _ in range(warm_steps):
        bench.step(decode=bench.rows(slots))
    before = asdict(bench.engine.offload.counts)
    times = []
    bench.enqueue_s.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        bench.step(decode=bench.rows(slots))
        times.append(time.perf_counter() - start)
    elapsed = time.perf_counter() - begin
    after = asdict(bench.engine.offload.counts)
    bench.release(*slots)
    spent = {name: after[name] - before[name] for name in after}
    return {
        "tok_s": width * steps / elapsed,
        "step_ms": statistics.median(times) * 1e3,
        "enqueue_ms": statistics.median(bench.enqueue_s) * 1e3,
        "hit_rate": spent["num_hit_picks"] / max(1, spent["num_picks"]),
        "vram_experts": spent["num_vram"] / steps,
        "link_experts": spent["num_link"] / steps,
        "cpu_experts": spent["num_cpu"] / steps,
        "copies": spent["num_copies"] / steps,
    }


def measure_beside(bench: Bench, num_tokens: int, layers: int) -> dict[str, float]:
    """Run a long prompt a few layers at a time beside one decoding stream; gives the stream's gaps."""
    bench.prefill_s(0, 96)
    for _ in range(8):
        bench.step(decode=bench.rows([0]))
    gaps = []
    begin = time.perf_counter()
    for piece in bench.pieces(1, num_tokens, layers):
        start = time.perf_counter()
        bench.step(prefill=piece, decode=bench.rows([0]))
        gaps.append(time.perf_counter() - start)
    elapsed = time.perf_counter() - begin
    bench.release(0, 1)
    return {
        "layers_a_step": float(layers),
        "prefill_tok_s": num_tokens / elapsed,
        "longest_gap_ms": max(gaps) * 1e3,
        "median_gap_ms": statistics.median(gaps) * 1e3,
    }


def soak(bench: Bench, seconds: float) -> dict[str, float]:
    """Mix prompts of many lengths, decode steps of 1 to 4 rows and aborts; watch memory and slots."""
    rng = np.random.default_rng(5)
    end, number, tokens = time.perf_counter() + seconds, 0, 0
    vram_begin = torch.cuda.memory_reserved()
    while time.perf_counter() < end:
        width = int(rng.integers(1, 5))
        slots = list(range(width))
        for slot in slots:
            bench.prefill_s(slot, int(rng.choice([3, 40, 200, 700, 2500])))
        for _ in range(int(rng.integers(5, 60))):
            bench.step(decode=bench.rows(slots))
            tokens += width
        if number % 3 == 0 and width < 4:
            pieces = bench.pieces(width, int(rng.choice([300, 5000])), 5)
            for piece in pieces[: int(rng.integers(1, len(pieces)))]:
                bench.step(prefill=piece, decode=bench.rows(slots))
            bench.release(width)
        bench.release(*slots)
        bench.engine.check_slots(4, seed=number)
        number += 1
    return {
        "rounds": float(number),
        "decoded_tokens": float(tokens),
        "vram_growth_mib": (torch.cuda.memory_reserved() - vram_begin) / 2**20,
        "peak_rss_gib": peak_rss_gib(),
    }


def peak_rss_gib() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def build(given: argparse.Namespace, model_dir: Path) -> tuple[CudaEngine, dict[str, Any]]:
    """Load the synthetic model; gives the engine and what loading took."""
    machine = read_machine()
    cpus = choose_cpus(given.cpus, machine)
    threads = 0 if given.mode == "exact" else given.threads or len(cpus)
    offload = OffloadOptions(
        mode=given.mode,
        vram=VramOptions(max_slots=given.max_slots),
        crew_threads=threads,
        crew_cpus=cpus,
    )
    options = CudaOptions(
        offload,
        cache_tokens=given.cache_tokens,
        vram_bytes=int(given.vram * GIB) if given.vram else None,
        max_chunk_tokens=given.chunk,
    )
    begin = time.perf_counter()
    package = open_package(options.mode)
    limit_vram(options)
    config = load_model_config(model_dir)
    marks = {"imported_s": time.perf_counter() - begin}
    arena = fill_arena(config, ArenaOptions(pinning=RegisteredMemory(package.extension)), 14)
    marks["arena_s"] = time.perf_counter() - begin
    say(f"arena of {arena.region.num_bytes / GIB:.1f} GiB filled and registered: {marks}")
    loaded = load_model(
        package,
        model_dir,
        config,
        arena,
        options,
        lambda part: None,
        lambda files, device: SyntheticTensors(config, arena, device),
    )
    marks["loaded_s"] = time.perf_counter() - begin
    say(f"weights of {model_bytes(config) / GIB:.2f} GiB loaded: {marks['loaded_s']:.1f} s")
    sampler = SamplerBank(config.vocab_size, config.eos_token_ids)
    engine = CudaEngine.open(loaded, sampler, options)
    marks["opened_s"] = time.perf_counter() - begin
    engine.warm_up()
    marks["warm_s"] = time.perf_counter() - begin
    say(f"open after {marks['opened_s']:.1f} s, warm after {marks['warm_s']:.1f} s")
    for line in explain(engine.offload.plan):
        say(line)
    calibration = engine.offload.calibration
    for line in describe(calibration, arena.layout.record_bytes):
        say(line)
    facts = {
        **marks,
        "threads": threads,
        "slots": engine.offload.plan.num_slots,
        "calibration": asdict(calibration),
        "chunk_tokens": engine.limits.max_chunk_tokens,
    }
    return engine, facts


def run(given: argparse.Namespace, model_dir: Path, results: dict[str, Any], save: Any) -> None:
    engine, results["load"] = build(given, model_dir)
    bench = Bench(engine)
    save()
    for width in given.streams:
        results[f"decode_{width}"] = found = measure_decode(bench, width, given.warm, given.steps)
        say(f"decode {width}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        save()
    for length in SHORT_PROMPTS:
        times = []
        for _ in range(3):
            times.append(bench.prefill_s(0, length))
            bench.release(0)
        results[f"first_token_{length}_s"] = times
        say(f"first token of {length} tokens: {[round(value, 3) for value in times]} s")
    for length in given.prefill:
        times = []
        for _ in range(2 if length <= 8192 else 1):
            times.append(bench.prefill_s(0, length))
            bench.release(0)
        results[f"prefill_{length}_tok_s"] = [length / value for value in times]
        say(f"prefill of {length}: {[round(length / value) for value in times]} tok/s")
        save()
    if given.beside:
        results["beside"] = found = measure_beside(bench, given.beside, given.beside_layers)
        say("beside a prefill: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    if given.soak:
        results["soak"] = found = soak(bench, given.soak)
        say("mixed load: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    results["checked_slots"] = engine.check_slots(64, seed=9)
    results["counts"] = asdict(engine.offload.counts)
    results["peak_rss_gib"] = peak_rss_gib()
    results["peak_vram_gib"] = torch.cuda.max_memory_reserved() / GIB
    if engine.offload.lane is not None:
        crew = engine.offload.lane.stats()
        results["crew"] = asdict(crew) | {"ms_per_expert": crew.ms_per_expert}
    say(f"peak RAM {results['peak_rss_gib']:.1f} GiB, peak VRAM of torch {results['peak_vram_gib']:.1f} GiB")
    engine.close()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="directory with the model's config.json")
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--layers", type=int, help="take the first N layers")
    parser.add_argument("--vram", type=float, default=24.0, help="GiB of the card to use; 0: all")
    parser.add_argument("--cache-tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--max-slots", type=int)
    parser.add_argument("--cpus", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--warm", type=int, default=120, help="steps before timing")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--beside", type=int, default=0, help="tokens of a prompt beside a decoding stream")
    parser.add_argument("--beside-layers", type=int, default=2)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of mixed load")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    results: dict[str, Any] = {
        "options": {name: str(value) for name, value in vars(given).items()},
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }

    def save() -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(KeyboardInterrupt):
        model_dir = Path(directory)
        write_model_dir(given.config, model_dir, given.layers)
        try:
            run(given, model_dir, results, save)
        finally:
            save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
