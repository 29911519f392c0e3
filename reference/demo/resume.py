"""Training weights from a quantised checkpoint: what its matrices decode to.

The checkpoint is kept in git and the weights that it was made of are not; training runs under noise of the
size of this rounding anyway.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from reference.demo.export import upstream_tensors
from reference.demo.model import DemoModel, SparseMlp
from reference.exl3 import Exl3Tensors, linear

FILE = "model.safetensors"
FUSED = {f"{name}_proj": ("qkv_proj", part) for part, name in enumerate("qkv")}
FUSED |= {f"{name}_conv1d": ("conv1d", part) for part, name in enumerate("qkv")}
"""Tensors that a checkpoint stores as one: q, k and v of a linear attention, and their convolutions."""

BIAS = "e_score_correction_bias"


def is_checkpoint(directory: Path) -> bool:
    """Tell a checkpoint from weights that training wrote."""
    return (directory / FILE).is_file()


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not installed where types are checked
def load_checkpoint(model: DemoModel, directory: Path) -> None:
    """Fill a model from an EXL3 checkpoint of its shape. Raises ValueError naming what does not fit."""
    with safe_open(directory / FILE, framework="pt") as file:
        reader = _Reader(file)
        for name, target in upstream_tensors(model).items():
            value = reader.tensor(name)
            if value.numel() != target.numel():
                raise ValueError(
                    f"{directory / FILE}: {name} has {value.numel()} numbers, need {target.numel()}"
                )
            if not name.endswith(BIAS):  # which is exported less its mean, so the model holds another tensor
                target.copy_(value.reshape(target.shape))
        layers = [*enumerate(model.layers), (model.shape.num_layers, model.mtp)]
        for index, layer in layers:
            if isinstance(layer.mlp, SparseMlp):
                bias = reader.tensor(f"model.language_model.layers.{index}.mlp.gate.{BIAS}")
                layer.mlp.bias.copy_(bias)


class _Reader:
    """Reads tensors by their upstream names."""

    def __init__(self, file: object) -> None:
        self._file = file
        self._names = set(file.keys())  # type: ignore[attr-defined]
        self._decoded: tuple[str, Tensor] | None = None  # the last one, which its fused parts share

    def tensor(self, name: str) -> Tensor:
        """Give a tensor in float32: (out, in) for a matrix. Raises ValueError when it is not there."""
        if name in self._names:
            return self._get(name).float()
        key, _, last = name.rpartition(".")
        if last == "weight":
            head, _, module = key.rpartition(".")
            if f"{key}.trellis" in self._names:
                return self._matrix(key)
            if module in FUSED:
                whole, part = FUSED[module]
                fused = f"{head}.{whole}"
                stored = (
                    self._matrix(fused) if f"{fused}.trellis" in self._names else self._get(f"{fused}.weight")
                )
                return stored.chunk(3)[part].float()
        raise ValueError(f"the checkpoint lacks {name}")

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[attr-defined]
        return tensor

    def _matrix(self, key: str) -> Tensor:
        if self._decoded is not None and self._decoded[0] == key:
            return self._decoded[1]
        trellis: NDArray[np.int16] = self._get(f"{key}.trellis").numpy()
        stored = Exl3Tensors(
            trellis.view(np.uint16),
            self._get(f"{key}.suh").numpy(),
            self._get(f"{key}.svh").numpy(),
            "mul1",
        )
        rows = len(stored.suh)
        matrix = torch.from_numpy(linear(np.eye(rows), stored).T.astype(np.float32).copy())
        self._decoded = (key, matrix)
        return matrix
