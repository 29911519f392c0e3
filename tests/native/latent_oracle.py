"""Latent attention in float64, from the formulas of the model, one query at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def best_pools(scores: Float64, count: int) -> NDArray[np.int64]:
    """Give the indices, ascending, of the `count` largest scores; among equals the lowest index wins."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def visible_tokens(
    query: Float64, weights: Float64, pooled: Float64, num_visible: int, kpool: int, topk_pools: int
) -> NDArray[np.int64]:
    """Give the tokens, ascending, that one query (heads, dim), already scaled, reads."""
    num_pools = num_visible // kpool
    if num_pools <= topk_pools:
        return np.arange(num_visible)
    scores = weights @ np.maximum(query @ pooled[:num_pools].T, 0)
    members = best_pools(scores, topk_pools)[:, None] * kpool + np.arange(kpool)
    return np.concatenate([members.reshape(-1), np.arange(num_pools * kpool, num_visible)])


def attend(queries: Float64, latents: Float64, scale: float) -> Float64:
    """Attend from queries (heads, latent) over latents (tokens, latent)."""
    scores = queries @ latents.T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed: Float64 = weights / weights.sum(axis=1, keepdims=True) @ latents
    return mixed
