"""`python -m bench.sampler`: time one step's sampling. Prints a table of microseconds per call."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.engine.base import SequenceStart
from glm53srv.engine.sampler import SamplerBank
from glm53srv.request import SamplingParams

VOCAB_SIZE = 154_880
NUM_VALID_IDS = 154_856
MODEL_DEFAULT = SamplingParams(temperature=1.0, top_p=0.95)

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "T 1, no filter": SamplingParams(),
    "T 1, top_p 0.95 (the model's default)": MODEL_DEFAULT,
    "T 0.6, top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "T 1.5, top_p 0.99": SamplingParams(temperature=1.5, top_p=0.99),
    "top_k 40": SamplingParams(top_k=40),
    "top_k 2000, top_p 0.95": SamplingParams(top_k=2000, top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_p 0.95, all penalties, 300 biases": SamplingParams(
        top_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=tuple((token_id * 500, 1.0) for token_id in range(300)),
    ),
    "top_p 0.95, 20 log probabilities": SamplingParams(top_p=0.95, num_logprobs=20),
    "greedy, 20 log probabilities": SamplingParams(temperature=0.0, num_logprobs=20),
    "top_p 0.95, end ids banned": SamplingParams(top_p=0.95, min_tokens=1_000_000),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call."""

    least_us: float
    median_us: float


def peaked(rng: np.random.Generator, num_rows: int) -> NDArray[np.float32]:
    """Make rows as models give them: most ids spread widely, a few dozen far above them."""
    rows = 3.0 * rng.standard_normal((num_rows, VOCAB_SIZE), dtype=np.float32)
    for row in rows:
        row[rng.choice(NUM_VALID_IDS, 40, replace=False)] += rng.uniform(10.0, 20.0, 40).astype(np.float32)
    return rows


def flat(rng: np.random.Generator, num_rows: int) -> NDArray[np.float32]:
    """Make rows of standard normal logits: three quarters of the ids hold 95 % of the weight."""
    return rng.standard_normal((num_rows, VOCAB_SIZE), dtype=np.float32)


def measure(params: SamplingParams, logits: NDArray[np.float32], repeats: int) -> Timing:
    """Sample one token per row, `repeats` times, after a context of 20,000 tokens."""
    bank = SamplerBank(VOCAB_SIZE, (NUM_VALID_IDS - 1,), NUM_VALID_IDS)
    context = np.random.default_rng(1).zipf(1.2, 20_000) % NUM_VALID_IDS
    slots = range(len(logits))
    for slot in slots:
        halves = tuple(context[:10_000].tolist()), tuple(context[10_000:].tolist())
        bank.start(slot, SequenceStart(f"r{slot}", params, slot, halves[0], output_ids=halves[1]))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        bank.sample(slots, logits)
        times.append((time.perf_counter() - begin) * 1e6)
    return Timing(min(times), statistics.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sampler", description=__doc__)
    parser.add_argument("--repeats", type=int, default=60, help="calls per case (default 60)")
    repeats: int = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    print("| parameters | logits | rows | least us | median us |\n|---|---|---|---|---|")
    for make in (peaked, flat):
        logits = make(rng, 4)
        for name, params in CASES.items():
            timing = measure(params, logits[:1], repeats)
            print(f"| {name} | {make.__name__} | 1 | {timing.least_us:.0f} | {timing.median_us:.0f} |")
        timing = measure(MODEL_DEFAULT, logits, repeats)
        print(
            f"| the model's default | {make.__name__} | 4 | {timing.least_us:.0f} | {timing.median_us:.0f} |"
        )


if __name__ == "__main__":
    main()
