"""Manifold-constrained hyper-connections: how a layer reads and writes the residual streams.

Each of the two sites of a block reads one mixture of the streams and writes its result back into all of them,
with mixing weights computed from the streams themselves; the stream-to-stream matrix is made doubly
stochastic by Sinkhorn iterations. Formulas: transformers 5.24, models/glm5_next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glm53srv.model.ops import F32, matmul_rows, rms_norm, sigmoid, softmax


@dataclass(frozen=True, slots=True)
class SiteMix:
    """What a site computed before its layer ran.

    read: (rows, hidden), the layer's input before its norm. post: (rows, n), what each stream receives of the
    layer's output. comb: (rows, n, n), the share of stream i (first index) that goes to stream j.
    """

    read: F32
    post: F32
    comb: F32


class HyperConnection:
    """One site. fn: (2n + n^2, n * hidden). base: (2n + n^2,). scale: (3,). All float32; n streams."""

    def __init__(
        self, fn: F32, base: F32, scale: F32, sinkhorn_iters: int, eps: float, norm_eps: float
    ) -> None:
        self._fn_t = np.ascontiguousarray(fn.T)
        self._base = base
        self._scale = scale
        self._sinkhorn_iters = sinkhorn_iters
        self._eps = np.float32(eps)
        self._norm_eps = norm_eps

    def mix(self, streams: F32) -> SiteMix:
        """Compute the mixing weights of streams (rows, n, hidden) and what the layer reads."""
        rows, n, _ = streams.shape
        flat = rms_norm(streams.reshape(rows, -1), None, self._norm_eps)
        mixes = matmul_rows(flat, self._fn_t)
        scale, base = self._scale, self._base
        pre = sigmoid(mixes[:, :n] * scale[0] + base[:n]) + self._eps
        post = 2 * sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(rows, n, n)) + self._eps
        comb = self._balance(comb)
        read = pre[:, 0, None] * streams[:, 0]
        for stream in range(1, n):
            read += pre[:, stream, None] * streams[:, stream]
        return SiteMix(read, post, comb)

    def write(self, streams: F32, mix: SiteMix, output: F32) -> F32:
        """Give the streams (rows, n, hidden) after the layer returned output (rows, hidden)."""
        n = streams.shape[1]
        result = mix.post[:, :, None] * output[:, None, :]
        for stream in range(n):
            result += mix.comb[:, stream, :, None] * streams[:, stream, None, :]
        return result

    def _balance(self, comb: F32) -> F32:
        """Make rows and columns sum to 1, columns last."""
        eps = self._eps
        comb = comb / (comb.sum(axis=1, keepdims=True, dtype=np.float32) + eps)
        for _ in range(self._sinkhorn_iters - 1):
            comb = comb / (comb.sum(axis=2, keepdims=True, dtype=np.float32) + eps)
            comb = comb / (comb.sum(axis=1, keepdims=True, dtype=np.float32) + eps)
        return comb
