"""The small model against outputs of an independent float32 implementation and of a GPU implementation."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.model.checkpoint import Checkpoint, LinearNeed, QuantizedLinear
from glm53srv.model.config import load_model_config
from glm53srv.model.decoder import Decoder
from glm53srv.model.linear import FloatLinear, KernelContext, load_linear, load_mlps, to_matrix
from glm53srv.model.mlp import Router
from glm53srv.model.tensor_needs import layer_prefix, mlp_needs
from reference.model import ReferenceModel
from tests.model.goldens import Goldens, row_errors

DENSE_POSITIONS = 67
"""index_topk + index_kpool - 1: up to here every token is read."""

TOLERANCE = 1e-4
"""Relative to the float32 reference, whose own chunked run differs from its whole run by 1e-6."""

TIE_GAP = 1e-6
"""Score gaps below this, relative to the largest score, are rounding of float32: either pool is right."""

MOE_TOLERANCE = 2e-3
"""The GPU hands activations over in fp16 and sums partly in fp16; 1.4e-3 was measured over these rows."""


def test_logits_match_while_attention_is_dense(golden_decoder: Decoder, goldens: Goldens) -> None:
    logits = golden_decoder.forward(goldens.token_ids[:DENSE_POSITIONS])
    assert row_errors(logits, goldens.logits[:DENSE_POSITIONS]).max() < TOLERANCE


@pytest.mark.parametrize("layer", range(8))
def test_block_matches_wherever_its_cut_is_not_a_tie(
    golden_decoder: Decoder, goldens: Goldens, layer: int
) -> None:
    streams = golden_decoder.embed(goldens.token_ids) if layer == 0 else goldens.hidden(layer - 1)
    errors = row_errors(golden_decoder.block(layer, streams), goldens.hidden(layer))
    is_tie = np.zeros(len(errors), np.bool_)
    if layer in golden_decoder.config.mla_layers:
        reference = ReferenceModel(goldens.checkpoint_dir)
        is_tie = reference.cut_gaps(layer, streams.astype(np.float64)) < TIE_GAP
        # Few enough that the test stays one: 8 and 9 of the 233 positions that cut.
        assert 0 < is_tie.sum() < 12
    assert errors[~is_tie].max() < TOLERANCE


@pytest.mark.parametrize("layer", [3, 7])
def test_ties_go_to_the_lowest_pool(golden_decoder: Decoder, goldens: Goldens, layer: int) -> None:
    reference = ReferenceModel(goldens.checkpoint_dir)
    streams = goldens.hidden(layer - 1)
    expected = reference.block(layer, streams.astype(np.float64))
    # Every position, tied or not: the oracle breaks ties as the lowest index first.
    assert row_errors(golden_decoder.block(layer, streams), expected).max() < TOLERANCE


def test_linears_match_the_gpu(goldens: Goldens, context: KernelContext) -> None:
    checkpoint = Checkpoint(goldens.checkpoint_dir)
    keys = [name.removeprefix("lin_x.") for name in goldens.gpu if name.startswith("lin_x.")]
    assert len(keys) == 8
    for key in keys:
        x, y = goldens.gpu[f"lin_x.{key}"], goldens.gpu[f"lin_y.{key}"]
        linear = load_linear(context, checkpoint, LinearNeed(key, x.shape[1], y.shape[1]))
        # The GPU rounds activations to fp16 between the transforms: 3.5e-4 to 5.6e-4 against float64.
        assert row_errors(linear(x.astype(np.float32)), y).max() < 8e-4


def test_decoded_weights_equal_those_of_the_gpu(goldens: Goldens, context: KernelContext) -> None:
    checkpoint = Checkpoint(goldens.checkpoint_dir)
    keys = [name.removeprefix("inner.") for name in goldens.gpu if name.startswith("inner.")]
    assert len(keys) == 8
    for key in keys:
        expected = goldens.gpu[f"inner.{key}"]
        stored = checkpoint.linear(LinearNeed(key, *expected.shape))
        assert isinstance(stored, QuantizedLinear)
        assert np.array_equal(context.pool.decode(to_matrix(stored)), expected.astype(np.float32))


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_sparse_layer_matches_the_gpu(goldens: Goldens, context: KernelContext, rows: int) -> None:
    layer = SparseLayer(goldens, context)
    x = goldens.gpu[f"moe{rows}.x"].astype(np.float32)
    picks, weights = layer.router(x)
    y = layer.experts(x, picks, weights)
    assert row_errors(y, goldens.gpu[f"moe{rows}.y"]).max() < MOE_TOLERANCE


@pytest.mark.parametrize("rows", [1, 4])
def test_router_agrees_with_the_gpu(goldens: Goldens, context: KernelContext, rows: int) -> None:
    picks, weights = SparseLayer(goldens, context).router(goldens.gpu[f"moe{rows}.x"].astype(np.float32))
    assert (picks[:, -1] == 32).all()  # the shared expert, after the routed ones
    assert (weights[:, -1] == 1).all()
    picks, weights = picks[:, :-1], weights[:, :-1]
    by_id = np.take_along_axis(weights, np.argsort(picks, axis=1), axis=1)
    gpu_picks = goldens.gpu[f"moe{rows}.sel"]
    gpu_by_id = np.take_along_axis(goldens.gpu[f"moe{rows}.w"], np.argsort(gpu_picks, axis=1), axis=1)
    assert np.array_equal(np.sort(picks, axis=1), np.sort(gpu_picks, axis=1))
    assert np.allclose(by_id, gpu_by_id, rtol=2e-3)  # its logits and weights are fp16


@pytest.mark.parametrize("rows", [1, 4])
def test_a_pick_of_weight_zero_is_left_out(goldens: Goldens, context: KernelContext, rows: int) -> None:
    layer = SparseLayer(goldens, context)
    x = goldens.gpu[f"moe{rows}.x"].astype(np.float32)
    shared = np.full((rows, 1), 32, np.int32)
    picks = np.concatenate([goldens.gpu[f"moe{rows}.sel"].astype(np.int32), shared], axis=1)
    weights = np.concatenate([goldens.gpu[f"moe{rows}.w"], np.ones((rows, 1))], axis=1).astype(np.float32)
    weights[:, 1] = 0
    y = layer.experts(x, picks, weights)
    assert row_errors(y, goldens.gpu[f"moe{rows}.y_mask1"]).max() < MOE_TOLERANCE


class SparseLayer:
    """The feed-forward half of block 2, the layer that the GPU's outputs are of."""

    def __init__(self, goldens: Goldens, context: KernelContext) -> None:
        config = load_model_config(goldens.checkpoint_dir)
        checkpoint = Checkpoint(goldens.checkpoint_dir)
        prefix, hidden, moe = f"{layer_prefix(2)}.mlp", config.hidden_size, config.moe
        bias = checkpoint.float32(f"{prefix}.gate.e_score_correction_bias", (moe.num_experts,))
        gate = checkpoint.float32(f"{prefix}.gate.weight", (moe.num_experts, hidden))
        self.router = Router(moe, FloatLinear(context, gate), bias)
        names = [*(f"experts.{expert}" for expert in range(moe.num_experts)), "shared_experts"]
        needs = [tuple(mlp_needs(f"{prefix}.{name}", hidden, moe.expert_size)) for name in names]
        self.experts = load_mlps(context, checkpoint, needs, config.swiglu_limit)
