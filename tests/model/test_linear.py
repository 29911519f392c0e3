"""Linears as the model calls them: every codebook, plain weights, and what the clamps clamp."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.errors import CheckpointError
from glm53srv.kernels import ExpertTable
from glm53srv.model.checkpoint import CodebookName, QuantizedLinear
from glm53srv.model.config import MoeConfig
from glm53srv.model.linear import FloatLinear, GatedMlps, KernelContext, to_matrix
from glm53srv.model.mlp import Router
from reference import exl3
from tests.model.goldens import row_errors

NAMES = {"default": CodebookName.DEFAULT, "mcg": CodebookName.MCG, "mul1": CodebookName.MUL1}


def as_stored(tensors: exl3.Exl3Tensors) -> QuantizedLinear:
    trellis = tensors.trellis.view(np.int16)
    return QuantizedLinear("key", trellis, tensors.suh, tensors.svh, NAMES[tensors.codebook], tensors.bias)


@pytest.mark.parametrize("codebook", list(NAMES))
def test_codebook_of_the_checkpoint_reaches_the_kernels(context: KernelContext, codebook: str) -> None:
    tensors = exl3.random_tensors(np.random.default_rng(1), 128, 256, 3, codebook, bias=True)
    matrix = to_matrix(as_stored(tensors))
    x = np.random.default_rng(2).normal(size=(3, 128)).astype(np.float32)
    assert np.array_equal(context.pool.decode(matrix), exl3.decode(tensors).astype(np.float32))
    assert row_errors(context.pool.linear(x, matrix), exl3.linear(x.astype(np.float64), tensors)).max() < 2e-6


def test_linear_that_the_kernels_refuse_is_named() -> None:
    tensors = exl3.random_tensors(np.random.default_rng(1), 128, 128, 3, "mul1")
    broken = QuantizedLinear(
        "layers.1.o_proj", tensors.trellis.view(np.int16), tensors.suh[:64], tensors.svh, CodebookName.MUL1
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.o_proj: suh must be"):
        to_matrix(broken)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_plain_linear_multiplies_by_the_transpose(context: KernelContext, dtype: type, rows: int) -> None:
    rng = np.random.default_rng(3)
    weight: NDArray[np.floating] = rng.normal(size=(32, 256)).astype(dtype)
    x = rng.normal(size=(rows, 256)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert row_errors(FloatLinear(context, weight)(x), expected).max() < 1e-6


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_gate_is_clamped_before_silu_and_only_from_above(context: KernelContext, limit: float) -> None:
    rng = np.random.default_rng(4)
    gate, up = (exl3.random_tensors(rng, 128, 128, 3, "mul1") for _ in range(2))
    down = exl3.random_tensors(rng, 128, 128, 3, "mul1")
    x = 4 * rng.normal(size=(6, 128)).astype(np.float32)
    exact = x.astype(np.float64)
    assert np.abs(exl3.linear(exact, gate)).max() > 2 * 2.0  # both clamps are at work
    assert np.abs(exl3.linear(exact, up)).max() > 2 * 2.0
    table = ExpertTable([(to_matrix(as_stored(gate)), to_matrix(as_stored(up)), to_matrix(as_stored(down)))])
    y = GatedMlps(context, table, limit)(x, np.zeros((6, 1), np.int32), np.full((6, 1), 0.5, np.float32))
    assert row_errors(y, 0.5 * exl3.gated_expert(exact, gate, up, down, limit)).max() < 2e-6


def make_router(scores: list[float], bias: list[float], *, normalizes: bool = True) -> Router:
    """Give a router that takes its scores as they are, whatever the token."""
    logits = np.log(np.array(scores) / (1 - np.array(scores))).astype(np.float32)

    def constant(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.tile(logits, (len(x), 1))

    config = MoeConfig(len(scores), 2, expert_size=128, normalize_weights=normalizes, weight_scale=2.5)
    return Router(config, constant, np.array(bias, np.float32))


def test_router_bias_chooses_and_does_not_weigh() -> None:
    picks, weights = make_router([0.6, 0.5, 0.2, 0.3], [0, 0, 0.9, 0])(np.zeros((1, 4), np.float32))
    assert picks.tolist() == [[2, 0, 4]]  # best first, then the shared expert
    assert weights[0] == pytest.approx([2.5 * 0.2 / 0.8, 2.5 * 0.6 / 0.8, 1.0], rel=1e-6)


def test_router_takes_the_lower_index_among_equals() -> None:
    picks, _ = make_router([0.5, 0.5, 0.5, 0.5], [0, 0.1, 0, 0])(np.zeros((2, 4), np.float32))
    assert picks.tolist() == [[1, 0, 4], [1, 0, 4]]


def test_router_may_leave_weights_as_they_are() -> None:
    router = make_router([0.6, 0.5, 0.2, 0.3], [0, 0, 0, 0], normalizes=False)
    _, weights = router(np.zeros((1, 4), np.float32))
    assert weights[0] == pytest.approx([2.5 * 0.6, 2.5 * 0.5, 1.0], rel=1e-6)
