"""The small float32 operations between the large linears.

Everything here is row-wise: the result of a row does not depend on the other rows of the call, bit for bit,
as long as a call has at most BATCH_INVARIANT_ROWS rows. Decoding relies on it: a sequence gives the same
tokens alone and in a batch. For more rows (prefill) speed wins and products go to BLAS, whose sums depend on
the shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

BATCH_INVARIANT_ROWS = 8


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x) without overflow, precise at both ends. Any shape."""
    decayed = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, np.float32(1), decayed) / (1 + decayed), np.float32)


def silu(x: F32) -> F32:
    """x * sigmoid(x). Any shape."""
    return x * sigmoid(x)


def rms_norm(x: F32, weight: F32 | None, eps: float) -> F32:
    """Scale rows (..., n) to root mean square 1, then by weight (n,) if there is one."""
    mean: F32 = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    scaled: F32 = x / np.sqrt(mean + np.float32(eps))
    return scaled if weight is None else scaled * weight


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    """Shift and scale rows (..., n) to mean 0 and variance 1, then by weight and bias (n,)."""
    centred: F32 = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    variance: F32 = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
    normed: F32 = centred / np.sqrt(variance + np.float32(eps))
    return normed * weight + bias


def unit_length(x: F32, eps: float = 1e-6) -> F32:
    """Divide rows (..., n) by sqrt(sum of squares + eps)."""
    total: F32 = np.sum(x * x, axis=-1, keepdims=True, dtype=np.float32)
    scaled: F32 = x / np.sqrt(total + np.float32(eps))
    return scaled


def matmul_rows(x: F32, weight_t: NDArray[Any]) -> F32:
    """x (rows, in) times weight_t (in, out), float32. Few rows are multiplied one by one (see above)."""
    if x.shape[0] > BATCH_INVARIANT_ROWS:
        return np.asarray(x @ weight_t, np.float32)
    out = np.empty((x.shape[0], weight_t.shape[1]), np.float32)
    for row in range(x.shape[0]):
        np.matmul(x[row], weight_t, out=out[row])
    return out


def softmax(x: F32) -> F32:
    """e^x over the last axis, summing to 1; entries of -inf get 0. One finite entry per row is needed."""
    weights: F32 = np.exp(x - np.max(x, axis=-1, keepdims=True))
    weights /= np.sum(weights, axis=-1, keepdims=True, dtype=np.float32)
    return weights
