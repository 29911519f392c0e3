"""The dense kernels in float64, from the formulas of the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53srv.kernels import HyperConnection

Float64 = NDArray[np.float64]


def sigmoid(x: Float64) -> Float64:
    y: Float64 = 1.0 / (1.0 + np.exp(-x))
    return y


def mhc_site(x: Float64, site: HyperConnection) -> tuple[Float64, Float64, Float64]:
    rows = len(x)
    flat = x.reshape(rows, -1)
    flat = flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + site.norm_eps)
    m = flat @ site.fn.astype(np.float64).T
    base, scale = site.base.astype(np.float64), site.scale.astype(np.float64)
    pre = sigmoid(m[:, :4] * scale[0] + base[:4]) + site.eps
    post = 2.0 * sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    logits = (m[:, 8:] * scale[2] + base[8:]).reshape(rows, 4, 4)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    comb = weights / weights.sum(axis=2, keepdims=True) + site.eps
    comb = comb / (comb.sum(axis=1, keepdims=True) + site.eps)
    for _ in range(site.sinkhorn_iters - 1):
        comb = comb / (comb.sum(axis=2, keepdims=True) + site.eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + site.eps)
    return np.einsum("ri,rih->rh", pre, x), post, comb


def mhc_apply(x: Float64, y: Float64, post: Float64, comb: Float64) -> Float64:
    out: Float64 = post[:, :, None] * y[:, None, :] + np.einsum("rij,rih->rjh", comb, x)
    return out


def kda(state: Float64, q: Float64, k: Float64, v: Float64, g: Float64, beta: Float64) -> Float64:
    """Run one sequence: state (heads, 128, 128), changed in place; q, k, v, g (tokens, heads, 128)."""
    o = np.empty_like(q)
    for t in range(len(q)):
        state *= np.exp(g[t])[:, :, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hij,hi->hj", state, k[t]))
        state += k[t][:, :, None] * delta[:, None, :]
        o[t] = np.einsum("hij,hi->hj", state, q[t])
    return o


def conv(state: Float64, x: Float64, weight: Float64) -> Float64:
    """Run one sequence from state (3, channels); x (tokens, channels)."""
    padded = np.concatenate([state, x])
    y = sum(weight[tap] * padded[tap : tap + len(x)] for tap in range(4))
    result: Float64 = y * sigmoid(np.asarray(y))
    return result


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    y: Float64 = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight
    return y
