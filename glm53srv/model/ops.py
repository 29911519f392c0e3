"""Element-wise float32 operations that are not worth a native kernel. Rows are independent, bit for bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_LOWEST = np.float32(-87.0)
"""e^87 is the last power of e inside float32; the sigmoid of less is below 1e-37."""


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x), a new array of any shape."""
    y: F32 = np.maximum(x, _LOWEST)
    np.negative(y, out=y)
    np.exp(y, out=y)
    y += 1
    return np.reciprocal(y, out=y)


def unit_length(x: F32, eps: float = 1e-6) -> F32:
    """Divide rows (..., n) by sqrt(sum of squares + eps)."""
    total: F32 = np.sum(x * x, axis=-1, keepdims=True, dtype=np.float32)
    scaled: F32 = x / np.sqrt(total + np.float32(eps))
    return scaled


def softmax(x: F32) -> F32:
    """e^x over the last axis, summing to 1; entries of -inf get 0. One finite entry per row is needed."""
    weights: F32 = np.exp(x - np.max(x, axis=-1, keepdims=True))
    weights /= np.sum(weights, axis=-1, keepdims=True, dtype=np.float32)
    return weights
