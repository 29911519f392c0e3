"""What is measured on an open engine. Each measure leaves no sequence behind; times in s or ms, as named."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.bench_model.driver import Driver
from glm53srv.engine.cuda.engine import CudaEngine

Figures = dict[str, float]


def measure_decode(
    driver: Driver, engine: CudaEngine, width: int, warm_steps: int, steps: int, enqueue_s: list[float]
) -> Figures:
    """Decode `width` streams until the cache has settled, then time steps.

    enqueue_s: where the model notes the host's times; cleared here.
    """
    slots = list(range(width))
    for slot in slots:
        driver.prefill_s(slot, 96)
    for _ in range(warm_steps):
        driver.step(decode=slots)
    before = asdict(engine.offload.counts)
    enqueue_s.clear()
    begin = time.perf_counter()
    times, picks = [], []
    for _ in range(steps):
        times.append(driver.time_step(decode=slots))
        if engine.offload.last_picks is not None:
            picks.append(engine.offload.last_picks.copy())
    elapsed = time.perf_counter() - begin
    after = asdict(engine.offload.counts)
    driver.step(release=slots)
    spent = {name: after[name] - before[name] for name in after}
    return {
        "tok_s": width * steps / elapsed,
        "step_ms": statistics.median(times) * 1e3,
        "enqueue_ms": statistics.median(enqueue_s) * 1e3,
        "recall": recall_of_previous(picks, width),
        "hit_rate": spent["num_hit_picks"] / max(1, spent["num_picks"]),
        "vram_experts": spent["num_vram"] / steps,
        "link_experts": spent["num_link"] / steps,
        "cpu_experts": spent["num_cpu"] / steps,
        "split_experts": spent["num_split"] / steps,
        "copies": spent["num_copies"] / steps,
        "kept": spent["num_kept"] / steps,
        "guessed": spent["num_guessed"] / steps,
        "guessed_right": spent["num_guessed_right"] / steps,
    }


def recall_of_previous(picks: list[NDArray[np.int32]], num_rows: int) -> float:
    """Give the part of a row's picks that the step before had picked too; NaN with fewer than two steps.

    picks: of consecutive steps, int32 (layers, num_rows * top_k) each.
    """
    steps = [each.reshape(len(each), num_rows, -1) for each in picks]
    shares = [
        float((now[..., :, None] == before[..., None, :]).any(-1).mean())
        for before, now in itertools.pairwise(steps)
    ]
    return statistics.fmean(shares) if shares else float("nan")


def measure_prefill(driver: Driver, num_tokens: int, repeats: int) -> list[float]:
    """Time a prompt from its first slice to its first token, in s, several times."""
    times = []
    for _ in range(repeats):
        times.append(driver.prefill_s(0, num_tokens))
        driver.step(release=[0])
    return times


def measure_beside(driver: Driver, num_tokens: int, layers: int) -> Figures:
    """Run a long prompt a few layers at a time beside one decoding stream; gives the stream's gaps."""
    driver.prefill_s(0, 96)
    for _ in range(8):
        driver.step(decode=[0])
    begin = time.perf_counter()
    gaps = [driver.time_step(piece, decode=[0]) for piece in driver.pieces(1, num_tokens, layers)]
    elapsed = time.perf_counter() - begin
    driver.step(release=[0, 1])
    return {
        "layers_a_step": float(layers),
        "prefill_tok_s": num_tokens / elapsed,
        "longest_gap_ms": max(gaps) * 1e3,
        "median_gap_ms": statistics.median(gaps) * 1e3,
    }


def soak(driver: Driver, engine: CudaEngine, seconds: float) -> Figures:
    """Mix prompts of many lengths, decode steps of 1 to 4 rows, aborts, and prompts on a card that something
    else has filled; watch memory and slots. Raises EngineError for a slot that differs from home.

    Growth counts from the end of the first tenth: by then every shape has come up.
    """
    rng = np.random.default_rng(5)
    begin, number, tokens, aborted, filled, refused = time.perf_counter(), 0, 0, 0, 0, 0
    end, settled = begin + seconds, begin + seconds / 10
    vram_begin, rss_begin = 0, float("nan")
    while time.perf_counter() < end:
        if not vram_begin and time.perf_counter() >= settled:
            vram_begin, rss_begin = torch.cuda.memory_reserved(), rss_gib()
        width = int(rng.integers(1, 5))
        slots = list(range(width))
        for slot in slots:
            driver.prefill_s(slot, int(rng.choice([3, 40, 200, 700, 2500])))
        for _ in range(int(rng.integers(5, 60))):
            driver.step(decode=slots)
            tokens += width
        if number % 3 == 0 and width < 4:
            pieces = driver.pieces(width, int(rng.choice([300, 5000])), 5)
            for piece in pieces[: int(rng.integers(1, len(pieces)))]:
                driver.step(piece, decode=slots)
            driver.step(release=[width])
            aborted += 1
        if number % 10 == 5 and width < 4:
            filled += 1
            refused += outgrow(driver, width, slots)
        driver.step(release=slots)
        engine.check_slots(4, seed=number)
        number += 1
    return {
        "rounds": float(number),
        "decoded_tokens": float(tokens),
        "aborted_prompts": float(aborted),
        "prompts_on_a_full_card": float(filled),
        "refused_prompts": float(refused),
        "vram_growth_mib": (torch.cuda.memory_reserved() - vram_begin) / 2**20,
        "rss_growth_mib": (rss_gib() - rss_begin) * 2**10,
        "peak_rss_gib": peak_rss_gib(),
    }


def outgrow(
    driver: Driver,
    slot: int,
    decode: list[int],
    num_tokens: int = 5000,
    fill: Callable[[], list[Any]] | None = None,
) -> bool:
    """Let a prompt run on a card that fills up behind its first layers; tells whether it was refused.

    The streams `decode` go on in every step. fill: takes the card's memory, fill_card by default; it is given
    back at the end.
    """
    pieces = driver.pieces(slot, num_tokens, 5)
    driver.step(pieces[0], decode=decode)
    ballast = (fill or fill_card)()
    found = [driver.step(piece, decode=decode) for piece in pieces[1:]]
    ballast.clear()
    torch.cuda.empty_cache()
    driver.step(release=[slot])
    return any(token.error is not None for step in found for token in step.tokens)


def fill_card(spare: int = 4) -> list[torch.Tensor]:
    """Take the memory that this process may still take of the card, but for `spare` pieces of 64 MiB."""
    taken: list[torch.Tensor] = []
    try:
        while True:
            taken.append(torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        del taken[-spare:]
    torch.cuda.empty_cache()
    return taken


def rss_gib() -> float:
    """Give the memory that this process holds, NaN where the kernel does not say."""
    return _of_process("VmRSS:")


def peak_rss_gib() -> float:
    """Give the most memory that this process has held, NaN where the kernel does not say."""
    return _of_process("VmHWM:")


def _of_process(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 2**20
    return float("nan")
