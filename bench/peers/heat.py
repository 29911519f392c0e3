"""Which experts are popular: what stock's static placement sorts by, hottest first.

The file is the package's own: {module key: [a number for each expert]}, EXL3_MOE_CPU_SPLIT_STATS.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig
from glm53srv.model.tensor_needs import layer_prefix
from glm53srv.offload.device.layout import sparse_layers

Heat = dict[str, list[float]]


def module_key(layer: int) -> str:
    """Name a sparse layer as the package does."""
    return f"{layer_prefix(layer)}.mlp"


def counted_heat(config: ModelConfig, history: NDArray[np.float32]) -> Heat:
    """Take our engine's count: float32 (sparse layers * experts,), picks per step."""
    table = history.reshape(len(sparse_layers(config)), config.moe.num_experts)
    return {module_key(layer): row.tolist() for layer, row in zip(sparse_layers(config), table, strict=True)}


def router_heat(config: ModelConfig, model_dir: Path) -> Heat:
    """Take the routers' biases instead, by which random weights make experts popular. Raises
    CheckpointError."""
    checkpoint, heat = Checkpoint(model_dir), {}
    for layer in sparse_layers(config):
        name = f"{module_key(layer)}.gate.e_score_correction_bias"
        bias = checkpoint.float32(name, (config.moe.num_experts,))
        heat[module_key(layer)] = bias.tolist()
    return heat


def load_heat(path: Path, config: ModelConfig) -> Heat:
    """Read a file of counts. Raises BadInput unless it knows every sparse layer and expert."""
    try:
        heat = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as counts of experts ({error})") from error
    for layer in sparse_layers(config):
        counts = heat.get(module_key(layer)) if isinstance(heat, dict) else None
        if not isinstance(counts, list) or len(counts) != config.moe.num_experts:
            raise BadInput(f"{path}: has no {config.moe.num_experts} counts for {module_key(layer)}")
    return dict(heat)


def save_heat(path: Path, heat: Heat) -> None:
    """Write a file of counts."""
    path.write_text(json.dumps(heat) + "\n", encoding="utf-8")
