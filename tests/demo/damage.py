"""A copy of the demo model with one expert of one layer silent: the one that most tokens go to."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53srv.kernels import KernelPool
from glm53srv.model.config import MlpKind, load_model_config
from glm53srv.model.linear import KernelContext
from glm53srv.model.loading import load_decoder
from glm53srv.model.mlp import Experts
from glm53srv.model.ops import F32
from glm53srv.model.tensor_needs import layer_prefix
from tests.model.checkpoints import read_file, write_file


class CountedPicks:
    """Experts that give zeros and count who was picked. Only the first sparse layer's counts mean anything:
    what the layers behind it see is no longer the model's."""

    def __init__(self, num_experts: int) -> None:
        self.counts = np.zeros(num_experts + 1, np.int64)

    def __call__(self, x: F32, picks: NDArray[np.int32], weights: F32) -> F32:
        self.counts += np.bincount(picks.ravel(), minlength=len(self.counts))
        return np.zeros_like(x)


def most_used_expert(model_dir: Path, texts: Iterable[Sequence[int]]) -> int:
    """Give the index of the expert of the first sparse layer that most tokens of the texts pick."""
    num_experts = load_model_config(model_dir).moe.num_experts
    first = CountedPicks(num_experts)

    def source(layer: int) -> Experts:
        return first if layer == 0 else CountedPicks(num_experts)

    with KernelPool(1) as pool:
        decoder = load_decoder(
            model_dir,
            KernelContext(pool),
            open_experts=lambda checkpoint, config: lambda _, layer: source(layer),
        )
        for ids in texts:
            decoder.forward(list(ids))
    return int(first.counts[:num_experts].argmax())


def silence(model_dir: Path, expert: int, target: Path) -> Path:
    """Copy a model to target, with one expert of the first sparse layer giving zeros; gives the copy."""
    layer = load_model_config(model_dir).mlp_kinds.index(MlpKind.SPARSE)
    shutil.copytree(model_dir, target)
    weights = target / "model.safetensors"
    header, data = read_file(weights)
    name = f"{layer_prefix(layer)}.mlp.experts.{expert}.down_proj.svh"
    begin, end = header[name]["data_offsets"]
    write_file(weights, header, data[:begin] + bytes(end - begin) + data[end:])
    return target
