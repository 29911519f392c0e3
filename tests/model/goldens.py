"""Reference outputs of the small model beside the checkout, and how outputs are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file


class Goldens:
    """float32 outputs of an independent implementation, and outputs of a GPU implementation."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint_dir = folder / "checkpoint"
        self._float32 = load_file(folder / "golden_fp32.safetensors")
        self.gpu = load_file(folder / "exllamav3_h200.safetensors")
        self.token_ids: list[int] = self._float32["ids"].tolist()
        self.logits: NDArray[np.float32] = self._float32["logits"]

    def hidden(self, layer: int) -> NDArray[np.float32]:
        """Give the streams (tokens, 4, hidden) after a layer."""
        streams: NDArray[np.float32] = self._float32[f"hidden.{layer}"]
        return streams


def row_errors(actual: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """Give |actual - expected| / |expected| of each row; all axes after the first belong to the row."""
    a = actual.reshape(len(actual), -1).astype(np.float64)
    e = expected.reshape(len(expected), -1).astype(np.float64)
    errors: NDArray[np.float64] = np.linalg.norm(a - e, axis=1) / np.linalg.norm(e, axis=1)
    return errors
