"""The two norms of the model."""

from __future__ import annotations

import numpy as np

from glm53srv.model.linear import KernelContext
from glm53srv.model.ops import F32


class RmsNorm:
    """Scale rows to root mean square 1, then by a weight (width,) per channel."""

    def __init__(self, context: KernelContext, weight: F32, eps: float) -> None:
        self._context = context
        self._weight = weight
        self._eps = eps

    def __call__(self, x: F32) -> F32:
        """x: float32 (rows, width)."""
        return self._context.pool.rms_norm(x, self._weight, self._eps)


class LayerNorm:
    """Shift and scale rows to mean 0 and variance 1, then by weight and bias (width,)."""

    def __init__(self, weight: F32, bias: F32, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = np.float32(eps)

    def __call__(self, x: F32) -> F32:
        """x: float32 (rows, width)."""
        centred: F32 = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
        variance: F32 = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
        normed: F32 = centred / np.sqrt(variance + self._eps)
        return normed * self._weight + self._bias
