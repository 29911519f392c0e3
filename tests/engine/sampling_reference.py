"""Sampling written plainly: float64, a full sort of the row, one operation after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53srv.request import SamplingParams

Logits = NDArray[np.float32]
Float64 = NDArray[np.float64]


def ranking(row: Logits) -> NDArray[np.int64]:
    """Give all ids by (logit descending, id ascending)."""
    return np.argsort(-row.astype(np.float64), kind="stable")


def probabilities(row: Logits, params: SamplingParams) -> Float64:
    """Give the probability of each id after temperature, top_k, top_p and min_p."""
    order = ranking(row)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((row.astype(np.float64) - float(row.max())) / params.temperature)
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights[order])
        order = order[: int((cumulative < params.top_p * weights[order].sum()).sum()) + 1]
    kept = np.zeros_like(weights)
    kept[order] = np.where(weights[order] >= params.min_p, weights[order], 0.0)
    return np.asarray(kept / kept.sum())


def draw(row: Logits, params: SamplingParams, u: float) -> int:
    """Give the id whose share of the cumulative probabilities, in id order, holds u."""
    cumulative = np.cumsum(probabilities(row, params))
    return int((cumulative <= u).sum())
