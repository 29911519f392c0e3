"""The sampler's kernels against float64 and a full sort, in every instruction set.

A drawn id may differ from the reference's where u falls within rounding of the border of two ids; u comes
from a generator with a fixed seed here, and no such case is among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.kernels import Isa, cpu_features
from glm53srv.request import SamplingParams
from glm53srv.sampler_kernel import SamplerKernel
from tests.engine import sampling_reference as reference

Logits = NDArray[np.float32]

MAX_IDS = 20_000
# Around the width of a block (128) and of twice the groups (2048, 16384), and few.
LENGTHS = (*range(1, 68), 127, 128, 129, 1024, 2047, 2048, 2049, 16_383, 16_384, MAX_IDS)

FILTERS = (
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=1.5, top_p=0.99),
    SamplingParams(temperature=100.0, top_p=0.5),
    SamplingParams(temperature=1e-300, top_p=0.9),
    SamplingParams(top_k=40),
    SamplingParams(top_k=300, min_p=0.01),
    SamplingParams(temperature=5.0, top_k=2000, top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=2.0, top_k=17_000, top_p=0.8, min_p=0.1),
)


@pytest.fixture(params=[isa for isa in Isa if isa is not Isa.AUTO], ids=lambda isa: isa.name)
def kernel(request: pytest.FixtureRequest) -> SamplerKernel:
    """Give a kernel per instruction set; those that this machine lacks are skipped."""
    isa: Isa = request.param
    if isa not in cpu_features().isas:
        pytest.skip(f"needs {isa.name}, which this CPU or build lacks")
    return SamplerKernel(MAX_IDS, isa)


def rows_of(num_ids: int) -> Iterator[Logits]:
    """Make rows of every kind that the selection treats differently."""
    rng = np.random.default_rng(num_ids)
    flat = rng.standard_normal(num_ids, dtype=np.float32)
    yield flat
    peaked = 3.0 * flat
    peaked[rng.integers(0, num_ids, 40)] += rng.uniform(10.0, 20.0, 40).astype(np.float32)
    yield peaked
    yield rng.integers(-2, 2, num_ids).astype(np.float32)  # nearly all are tied
    yield np.sort(flat)
    yield np.where(np.arange(num_ids) % 2, np.float32(0.0), np.float32(-0.0))  # equal, with different bits
    holes = np.where(rng.random(num_ids) < 0.7, np.float32(-np.inf), flat)
    holes[num_ids // 2] = 500.0 if num_ids % 2 else 0.0
    yield holes.astype(np.float32)
    yield (flat * np.float32(1e-3) + np.float32(40.0)).astype(np.float32)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draw_is_the_reference_draw(kernel: SamplerKernel, params: SamplingParams) -> None:
    rng = np.random.default_rng(7)
    for num_ids in LENGTHS:
        for row in rows_of(num_ids):
            cumulative = np.cumsum(reference.probabilities(row, params))
            for u in (0.0, *rng.random(3).tolist()):
                drawn = kernel.draw(row, float(row.max()), params, u)
                assert drawn == int((cumulative <= u).sum()), f"{num_ids} ids, u {u}"


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_largest_u_draws_the_last_weight_that_rounding_reaches(
    kernel: SamplerKernel, params: SamplingParams
) -> None:
    for num_ids in LENGTHS:
        for row in rows_of(num_ids):
            probabilities = reference.probabilities(row, params)
            drawn = kernel.draw(row, float(row.max()), params, 1.0 - 2.0**-53)
            assert probabilities[drawn] > 0.0
            assert probabilities[drawn + 1 :].sum() < 1e-12


def test_total_is_the_sum_in_float64(kernel: SamplerKernel) -> None:
    for num_ids in LENGTHS:
        for row in rows_of(num_ids):
            exact = math.fsum(np.exp(row.astype(np.float64) - float(row.max())))
            # 2 units in the last place per weight, and chains of at most 16 + 157 terms in sums.
            assert kernel.total(row, float(row.max())) == pytest.approx(exact, rel=1e-13)


def test_top_is_the_beginning_of_the_ranking(kernel: SamplerKernel) -> None:
    for num_ids in LENGTHS:
        for row in rows_of(num_ids):
            for count in {1, min(20, num_ids), num_ids // 2 or 1, num_ids}:
                assert kernel.top(row, count).tolist() == reference.ranking(row)[:count].tolist()


def test_every_instruction_set_gives_the_same_bits() -> None:
    scalar, *others = [SamplerKernel(MAX_IDS, isa) for isa in cpu_features().isas]
    rng = np.random.default_rng(3)
    for num_ids in (1, 7, 130, 5000, MAX_IDS):
        for row in rows_of(num_ids):
            largest = float(row.max())
            for kernel in others:
                assert kernel.total(row, largest) == scalar.total(row, largest)
                for params in FILTERS:
                    u = float(rng.random())
                    assert kernel.draw(row, largest, params, u) == scalar.draw(row, largest, params, u)


def row_of_bad_samples(num_ids: int, top_k: int) -> Logits:
    """Make a row whose evenly spaced samples are always the best ids that are left.

    So a pivot chosen among 31 samples leaves nearly everything on one side, again and again. This follows
    sampled_pivot() and prefix_end() of native/src/sampler.c.
    """
    rank_of: dict[int, int] = {}
    left = list(range(num_ids))
    for _ in range(20):
        sample = [left[i * len(left) // 31] for i in range(31)]
        for token_id in sample:
            rank_of.setdefault(token_id, len(rank_of))
        ranks = sorted(rank_of[token_id] for token_id in sample)
        fraction = (top_k - (num_ids - len(left))) / len(left)
        pivot = ranks[min(29, math.ceil(fraction * 31) - 1)]
        left = [token_id for token_id in left if rank_of.get(token_id, num_ids) > pivot]
    row = np.arange(-num_ids, 0, dtype=np.float32)
    row[list(rank_of)] = [float(num_ids - rank) for rank in rank_of.values()]
    return row


def test_bad_samples_give_the_right_prefix(kernel: SamplerKernel) -> None:
    row = row_of_bad_samples(3000, 2500)
    assert kernel.top(row, 2500).tolist() == reference.ranking(row)[:2500].tolist()


def test_contiguous_float32_of_at_most_the_promised_length_is_required(kernel: SamplerKernel) -> None:
    with pytest.raises(ValueError, match="contiguous float32"):
        kernel.total(np.zeros(10, dtype=np.float32)[::2], 0.0)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernel.total(np.zeros(10).view(np.float64), 0.0)
    with pytest.raises(ValueError, match="out of range"):
        kernel.total(np.zeros(MAX_IDS + 1, dtype=np.float32), 0.0)
    with pytest.raises(ValueError, match="out of range"):
        kernel.draw(np.zeros(3, dtype=np.float32), 0.0, SamplingParams(temperature=0.0), 0.5)
