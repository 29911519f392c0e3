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


class Experts(Protocol):
    """Sum weights (rows, k) times the networks picks (rows, k) of x (rows, hidden), in the order of k."""

    def __call__(self, x: F32, picks: NDArray[np.int32], weights: F32) -> F32: ...


class DenseMlp:
    """One gated network for all tokens."""

    def __init__(self, network: GatedMlps) -> None:
        self._network = network

    def __call__(self, x: F32) -> F32:
        rows = len(x)
        return self._network(x, np.zeros((rows, 1), np.int32), np.ones((rows, 1), np.float32))


class Router:
    """Chooses top_k experts of each token and their weights, and adds the shared expert to each.

    correction_bias: (num_experts,) float32. The shared expert has index num_experts.
    """

    def __init__(self, config: MoeConfig, logits: Linear, correction_bias: F32) -> None:
        self._config = config
        self._logits = logits
        self._correction_bias = correction_bias

    def __call__(self, x: F32) -> tuple[NDArray[np.int32], F32]:
        """Give picks and weights (rows, top_k + 1): the routed experts, best first, and the shared one.

        The bias decides who is picked and has no part in the weights; equal scores go to the lower index.
        """
        config = self._config
        scores = sigmoid(self._logits(x))
        ranked = np.argsort(-(scores + self._correction_bias), axis=1, kind="stable")
        picks = np.full((len(x), config.top_k + 1), config.num_experts, np.int32)
        picks[:, :-1] = ranked[:, : config.top_k]
        weights = np.ones((len(x), config.top_k + 1), np.float32)
        routed = np.take_along_axis(scores, picks[:, :-1], axis=1)
        if config.normalize_weights:
            routed /= routed.sum(axis=1, keepdims=True, dtype=np.float32) + _TINY
        np.multiply(routed, np.float32(config.weight_scale), out=weights[:, :-1])
        return picks, weights


class SparseMlp:
    """Routed experts plus a shared one that every token passes with weight 1.

    experts: the routed ones and, after them, the shared one, so that one call computes all.
    """

    def __init__(self, router: Router, experts: Experts) -> None:
        self._router = router
        self._experts = experts

    def __call__(self, x: F32) -> F32:
        picks, weights = self._router(x)
        return self._experts(x, picks, weights)
