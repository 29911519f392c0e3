"""Counts of experts, in the file that the package's static placement reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.errors import BadInput
from bench.peers.heat import counted_heat, load_heat, module_key, router_heat, save_heat
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.offload.device.layout import sparse_layers


@pytest.fixture(scope="module")
def config(random_model_dir: Path) -> ModelConfig:
    return load_model_config(random_model_dir)


def test_our_engines_counts_come_back_by_layer(config: ModelConfig, tmp_path: Path) -> None:
    layers, experts = sparse_layers(config), config.moe.num_experts
    history = np.random.default_rng(1).random(len(layers) * experts).astype(np.float32)
    path = tmp_path / "heat.json"

    save_heat(path, counted_heat(config, history))

    heat = load_heat(path, config)
    assert list(heat) == [f"model.language_model.layers.{layer}.mlp" for layer in layers]
    assert np.array_equal(np.array([heat[module_key(layer)] for layer in layers]).ravel(), history)


def test_without_counts_the_routers_biases_rank_the_experts(
    config: ModelConfig, random_model_dir: Path
) -> None:
    heat = router_heat(config, random_model_dir)
    layer = sparse_layers(config)[1]
    name = f"{module_key(layer)}.gate.e_score_correction_bias"
    bias = Checkpoint(random_model_dir).float32(name, (config.moe.num_experts,))
    assert np.argsort(heat[module_key(layer)]).tolist() == np.argsort(bias).tolist()
    assert len(heat) == len(sparse_layers(config))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model.language_model.layers.1.mlp": [1, 2]}'])
def test_counts_of_another_model_are_refused(config: ModelConfig, tmp_path: Path, text: str) -> None:
    path = tmp_path / "heat.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=str(path)):
        load_heat(path, config)


def test_one_layer_too_few_is_named(config: ModelConfig, tmp_path: Path) -> None:
    history = np.zeros(len(sparse_layers(config)) * config.moe.num_experts, np.float32)
    heat = counted_heat(config, history)
    last = module_key(sparse_layers(config)[-1])
    del heat[last]
    path = tmp_path / "heat.json"
    path.write_text(json.dumps(heat))
    with pytest.raises(BadInput, match=last):
        load_heat(path, config)
