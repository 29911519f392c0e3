"""Linear and expert products against float64, and that a row's bits depend on the row alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from glm53srv.kernels import Clamp, ExpertPart, Isa, KernelPool, Precision, cpu_features
from reference import exl3
from tests.native.builders import (
    ALL_FORMATS,
    TOLERANCE,
    Expert,
    as_matrix,
    as_table,
    expert_sum,
    random_experts,
    relative_rms,
)


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize(("codebook", "bits"), ALL_FORMATS)
def test_linear_matches_float64(pool: KernelPool, codebook: str, bits: float, precision: Precision) -> None:
    rng = np.random.default_rng(1)
    tensors = exl3.random_tensors(rng, 512, 384, bits, codebook, bias=True)
    x = rng.normal(size=(3, 512)).astype(np.float32)
    matrix = as_matrix(tensors)
    y = pool.linear(x, matrix, precision)
    used = pool.effective_precision(matrix, precision)
    assert relative_rms(y, exl3.linear(x.astype(np.float64), tensors)) < TOLERANCE[used]


@pytest.mark.parametrize("bits", [bits for codebook, bits in ALL_FORMATS if codebook == "mul1"])
def test_fast16_gives_the_same_bits_on_avx2_and_avx512(bits: float) -> None:
    # Its sums over a block are exact integers, and all that follows is done by the same functions.
    if Isa.AVX512 not in cpu_features().isas:
        pytest.skip("needs AVX512, which this CPU or build lacks")
    rng = np.random.default_rng(23)
    matrix = as_matrix(exl3.random_tensors(rng, 384, 256, bits, "mul1"))
    x = rng.normal(size=(9, 384)).astype(np.float32)
    with KernelPool(1, Isa.AVX2) as avx2, KernelPool(1, Isa.AVX512) as avx512:
        for rows in range(1, len(x) + 1):
            y = avx512.linear(x[:rows], matrix, Precision.FAST16)
            np.testing.assert_array_equal(y, avx2.linear(x[:rows], matrix, Precision.FAST16))


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("rows", [*range(1, 20), 31, 32, 33, 64, 67])
def test_linear_handles_any_row_count(pool: KernelPool, rows: int, precision: Precision) -> None:
    rng = np.random.default_rng(rows)
    tensors = exl3.random_tensors(rng, 256, 128, 3, "mul1")
    x = rng.normal(size=(rows, 256)).astype(np.float32)
    y = pool.linear(x, as_matrix(tensors), precision)
    assert relative_rms(y, exl3.linear(x.astype(np.float64), tensors)) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("shape", [(128, 128), (128, 4224), (4096, 128), (1152, 2176)])
def test_linear_handles_every_cut_of_a_matrix(
    pool: KernelPool, shape: tuple[int, int], precision: Precision
) -> None:
    rng = np.random.default_rng(7)
    tensors = exl3.random_tensors(rng, *shape, 3, "mul1")
    x = rng.normal(size=(2, shape[0])).astype(np.float32)
    y = pool.linear(x, as_matrix(tensors), precision)
    assert relative_rms(y, exl3.linear(x.astype(np.float64), tensors)) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_linear_row_bits_do_not_depend_on_other_rows(
    pool: KernelPool, bits: int, precision: Precision
) -> None:
    rng = np.random.default_rng(3)
    matrix = as_matrix(exl3.random_tensors(rng, 1280, 384, bits, "mul1"))
    x = rng.normal(size=(40, 1280)).astype(np.float32)
    alone = np.concatenate([pool.linear(x[r : r + 1], matrix, precision) for r in range(len(x))])
    for rows in (2, 3, 4, 5, 6, 7, 8, 9, 17, 40):
        np.testing.assert_array_equal(pool.linear(x[:rows], matrix, precision), alone[:rows])
    order = rng.permutation(8)
    np.testing.assert_array_equal(pool.linear(x[order], matrix, precision), alone[order])


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
def test_bits_do_not_depend_on_thread_count(pool: KernelPool, precision: Precision) -> None:
    experts = random_experts(5, 3, 256, 384)
    table = as_table(experts)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(5, 256)).astype(np.float32)
    picks = rng.integers(0, 3, (5, 2), dtype=np.int32)
    weights = rng.uniform(size=(5, 2)).astype(np.float32)
    expected = pool.experts(x, table, picks, weights, 10.0, precision=precision)
    for num_threads in (1, 2, 3):
        with KernelPool(num_threads, pool.isa) as other:
            for _ in range(3):
                y = other.experts(x, table, picks, weights, 10.0, precision=precision)
                np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("clamp", list(Clamp), ids=lambda clamp: clamp.name)
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_experts_match_float64(pool: KernelPool, limit: float, clamp: Clamp, precision: Precision) -> None:
    experts = random_experts(11, 5, 384, 256)
    rng = np.random.default_rng(11)
    x = rng.normal(size=(7, 384)).astype(np.float32)
    picks = rng.integers(-1, 5, (7, 3), dtype=np.int32)
    picks[4] = -1
    weights = rng.uniform(size=(7, 3)).astype(np.float32)
    y = pool.experts(x, as_table(experts), picks, weights, limit, clamp, precision)
    expected = expert_sum(x, experts, picks, weights, limit, clamps_gate=clamp is Clamp.GATE)
    assert relative_rms(y, expected) < TOLERANCE[precision]
    assert not y[4].any()


@pytest.mark.parametrize("rows", [*range(1, 12), 67])
def test_experts_handle_any_row_count(pool: KernelPool, rows: int) -> None:
    experts = random_experts(2, 4, 128, 256)
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 128)).astype(np.float32)
    picks = rng.integers(-1, 4, (rows, 3), dtype=np.int32)
    picks[0, 0] = 2
    weights = rng.uniform(size=(rows, 3)).astype(np.float32)
    y = pool.experts(x, as_table(experts), picks, weights, 10.0)
    assert relative_rms(y, expert_sum(x, experts, picks, weights, 10.0)) < TOLERANCE[Precision.EXACT32]


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
def test_expert_row_bits_do_not_depend_on_other_rows(pool: KernelPool, precision: Precision) -> None:
    table = as_table(random_experts(13, 4, 256, 384))
    rng = np.random.default_rng(13)
    x = rng.normal(size=(30, 256)).astype(np.float32)
    picks = rng.integers(-1, 4, (30, 3), dtype=np.int32)
    weights = rng.uniform(size=(30, 3)).astype(np.float32)

    def run(rows: list[int]) -> np.ndarray:
        return pool.experts(x[rows], table, picks[rows], weights[rows], 1.0, precision=precision)

    alone = np.concatenate([run([r]) for r in range(30)])
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 30):
        rows = rng.permutation(30)[:count].tolist()
        np.testing.assert_array_equal(run(rows), alone[rows])


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("rows", [9, 40, 100, 128, 250])
def test_rows_spread_over_many_experts_give_the_bits_of_each_alone(
    pool: KernelPool, precision: Precision, rows: int
) -> None:
    """A short prompt: many rows, few of each expert. 250 rows are more visits than go by tasks."""
    num_experts = 80
    table = as_table(random_experts(17, num_experts, 128, 256))
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 128)).astype(np.float32)
    places = np.arange(2 * rows).reshape(rows, 2)
    picks = ((7 * places) % num_experts).astype(np.int32)  # at most 2 * rows / 80 of each, rounded up
    weights = rng.uniform(size=(rows, 2)).astype(np.float32)

    def run(which: list[int]) -> np.ndarray:
        return pool.experts(x[which], table, picks[which], weights[which], 1.0, precision=precision)

    alone = np.concatenate([run([r]) for r in range(rows)])
    np.testing.assert_array_equal(run(list(range(rows))), alone)
    picks[: min(rows, 9), 0] = 5  # one more than go by tasks
    alone = np.concatenate([run([r]) for r in range(rows)])
    np.testing.assert_array_equal(run(list(range(rows))), alone)


def without_the_first(experts: list[Expert], which: int, blocks: int) -> list[Expert]:
    """Leave an expert's first blocks of neurons out by down's input scales: what a GPU does."""
    gate, up, down = experts[which]
    suh = down.suh.copy()
    suh[: 128 * blocks] = 0
    masked = dataclasses.replace(down, suh=suh)
    return [*experts[:which], (gate, up, masked), *experts[which + 1 :]]


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_parts_of_an_expert_add_up_to_the_whole(
    pool: KernelPool, rows: int, precision: Precision
) -> None:
    experts = random_experts(23, 3, 128, 640)
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 128)).astype(np.float32)
    picks = np.tile(np.array([2, 0], np.int32), (rows, 1))
    weights = rng.uniform(size=(rows, 2)).astype(np.float32)
    alone = np.where(picks == 2, np.int32(2), np.int32(-1))

    def run(picks: np.ndarray, experts: list[Expert], part: ExpertPart | None) -> np.ndarray:
        return pool.experts(x, as_table(experts), picks, weights, 1.0, precision=precision, part=part)

    whole = run(picks, experts, None)
    expected = expert_sum(x, experts, picks, weights, 1.0)
    for cut in range(1, 5):
        low = run(picks, experts, ExpertPart(2, 0, cut))
        high = run(alone, experts, ExpertPart(2, cut, 5))
        masked = run(alone, without_the_first(experts, 2, cut), None)
        assert relative_rms(low, expected) > 0.05  # something is missing
        assert relative_rms(low + high, expected) < TOLERANCE[precision]
        np.testing.assert_allclose(high, masked, rtol=0, atol=1e-5 * float(np.abs(whole).max()))
    np.testing.assert_array_equal(run(picks, experts, ExpertPart(2, 0, 5)), whole)


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (9, ExpertPart(0, 0, 1)),
        (1, ExpertPart(2, 0, 1)),
        (1, ExpertPart(-1, 0, 1)),
        (1, ExpertPart(0, 0, 4)),
        (1, ExpertPart(0, 2, 2)),
        (1, ExpertPart(0, 0, 0)),
        (1, ExpertPart(0, -1, 1)),
    ],
)
def test_a_part_that_there_is_not_is_refused(pool: KernelPool, rows: int, part: ExpertPart) -> None:
    table = as_table(random_experts(1, 2, 128, 384))
    x, picks = np.ones((rows, 128), np.float32), np.zeros((rows, 1), np.int32)
    with pytest.raises(ValueError, match=r"part|argument|pick"):
        pool.experts(x, table, picks, np.ones((rows, 1), np.float32), 0.0, part=part)


def test_one_expert_with_weight_one_is_a_plain_gated_ffn(pool: KernelPool) -> None:
    experts = random_experts(17, 1, 128, 128)
    x = np.random.default_rng(17).normal(size=(4, 128)).astype(np.float32)
    y = pool.experts(x, as_table(experts), np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32), 0.0)
    assert relative_rms(y, exl3.gated_expert(x.astype(np.float64), *experts[0], 0.0)) < 1e-6


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(pool: KernelPool, value: float, precision: Precision) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 200] = value
    y = pool.linear(
        x, as_matrix(exl3.random_tensors(np.random.default_rng(1), 256, 128, 3, "mul1")), precision
    )
    assert np.isfinite(y[0]).all()
    assert not np.isfinite(y[1]).any()


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
def test_zeros_give_zeros(pool: KernelPool, precision: Precision) -> None:
    matrix = as_matrix(exl3.random_tensors(np.random.default_rng(1), 256, 128, 3, "mul1"))
    assert not pool.linear(np.zeros((1, 256), np.float32), matrix, precision).any()


@pytest.mark.parametrize("precision", list(Precision), ids=lambda precision: precision.name)
def test_largest_sums_do_not_overflow(pool: KernelPool, precision: Precision) -> None:
    # One channel alone transforms into 128 values of full scale, all of one sign for channel 0.
    tensors = exl3.random_tensors(np.random.default_rng(1), 128, 128, 8, "mul1")
    tensors.trellis[:] = _words_of_the_largest_byte_sum()
    x = np.zeros((1, 128), np.float32)
    x[0, 0] = 1e6
    y = pool.linear(x, as_matrix(tensors), precision)
    assert relative_rms(y, exl3.linear(x.astype(np.float64), tensors)) < TOLERANCE[precision]


def _words_of_the_largest_byte_sum() -> int:
    """Give the 16-bit word that, repeated, makes every other state of K = 8 the one with the largest sum."""
    states = np.arange(65536, dtype=np.uint16)
    return int(states[exl3.byte_sums(states).argmax()])


def test_hadamard_matches_float64(pool: KernelPool) -> None:
    x = np.random.default_rng(0).normal(size=(5, 384)).astype(np.float32)
    assert relative_rms(pool.hadamard(x), exl3.hadamard(x.astype(np.float64))) < 3e-7
