"""The feed-forward half of a block: one gated network, or a router over many and a shared one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm53srv.model.config import MoeConfig
from glm53srv.model.linear import GatedMlps, Linear
from glm53srv.model.ops import F32, sigmoid

_TINY = np.float32(1e-20)


class Mlp(Protocol):
    """x float32 (rows, hidden) -> float32 (rows, hidden)."""

    def __call__(self, x: F32) -> F32: ...


class DenseMlp:
    """One gated network for all tokens."""

    def __init__(self, network: GatedMlps) -> None:
        self._network = network

    def __call__(self, x: F32) -> F32:
        rows = len(x)
        return self._network(x, np.zeros((rows, 1), np.int32), np.ones((rows, 1), np.float32))


class Router:
    """Chooses top_k experts of each token and their weights. correction_bias: (num_experts,) float32."""

    def __init__(self, config: MoeConfig, logits: Linear, correction_bias: F32) -> None:
        self._config = config
        self._logits = logits
        self._correction_bias = correction_bias

    def __call__(self, x: F32) -> tuple[NDArray[np.int32], F32]:
        """Give picks (rows, top_k), best first, and weights (rows, top_k).

        The bias decides who is picked and has no part in the weights; equal scores go to the lower index.
        """
        config = self._config
        scores = sigmoid(self._logits(x))
        ranked = np.argsort(-(scores + self._correction_bias), axis=1, kind="stable")
        picks = ranked[:, : config.top_k].astype(np.int32)
        weights = np.take_along_axis(scores, picks, axis=1)
        if config.normalize_weights:
            weights = weights / (weights.sum(axis=1, keepdims=True, dtype=np.float32) + _TINY)
        return picks, weights * np.float32(config.weight_scale)


class SparseMlp:
    """Routed experts plus a shared network that every token passes."""

    def __init__(self, router: Router, experts: GatedMlps, shared: DenseMlp) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, x: F32) -> F32:
        picks, weights = self._router(x)
        return self._experts(x, picks, weights) + self._shared(x)
