"""Which experts are popular: what stock's static placement sorts by, hottest first.

The file is the package's own, EXL3_MOE_CPU_SPLIT_STATS: {module key: [a number for each expert]}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from glm53srv.bench_model.routes import RouteModel
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig
from glm53srv.model.tensor_needs import layer_prefix
from glm53srv.offload.device.layout import sparse_layers

Heat = dict[str, list[float]]


def module_key(layer: int) -> str:
    """Name a sparse layer as the package does."""
    return f"{layer_prefix(layer)}.mlp"


def placement(counts: Sequence[float]) -> list[int]:
    """Order a layer's experts as the package places them: hottest first, the lower number of two alike."""
    return sorted(range(len(counts)), key=lambda expert: -counts[expert])


def route_heat(config: ModelConfig, model: RouteModel) -> Heat:
    """Rank experts by their popularity over all conversations that the model of routes can draw: what a
    count over ever more of them comes to."""
    layers = sparse_layers(config)
    return {module_key(layer): model.offsets[index].tolist() for index, layer in enumerate(layers)}


def router_heat(config: ModelConfig, model_dir: Path) -> Heat:
    """Rank experts by the routers' biases, which make some of them popular in random weights.

    Raises CheckpointError.
    """
    checkpoint, heat = Checkpoint(model_dir), {}
    for layer in sparse_layers(config):
        name = f"{module_key(layer)}.gate.e_score_correction_bias"
        heat[module_key(layer)] = checkpoint.float32(name, (config.moe.num_experts,)).tolist()
    return heat


def save_heat(path: Path, heat: Heat) -> None:
    """Write the package's file."""
    path.write_text(json.dumps(heat) + "\n", encoding="utf-8")
