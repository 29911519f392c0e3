"""KDA: linear attention with a delta rule and a decay per key channel.

One token, per head, with the state S (keys x values) and log decays g:

    S = diag(e^g) S;   delta = beta (v - S^T k);   S = S + k delta^T;   o = S^T q

Prefill and decode are one computation: the kernels walk over the tokens of each sequence and give the same
bits for many tokens at once and one at a time. The block form of the rule (a triangular system per 16 tokens,
in numpy over BLAS) was tried and lost: 3.7 ms against 1.7 ms for 512 tokens of 2 heads on one core of an EPYC
(Zen 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53srv.model.config import KdaConfig
from glm53srv.model.linear import KernelContext, Linear
from glm53srv.model.norm import RmsNorm
from glm53srv.model.ops import F32, sigmoid, unit_length
from glm53srv.model.state import KdaState


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """The parts of one layer. float32: taps (conv_kernel, 3 * width), oldest first; decay_rate (heads, 1),
    e^A_log; dt_bias (heads, head_dim).
    """

    qkv: Linear
    taps: F32
    forget_a: Linear
    forget_b: Linear
    decay_rate: F32
    dt_bias: F32
    beta: Linear
    gate_a: Linear
    gate_b: Linear
    output_norm: RmsNorm
    output: Linear


class KdaAttention:
    """One linear attention layer. Stateless: the states come with each call and are updated in place."""

    def __init__(self, context: KernelContext, config: KdaConfig, weights: KdaWeights) -> None:
        self._pool = context.pool
        self._config = config
        self._weights = weights

    def __call__(self, x: F32, states: Sequence[KdaState]) -> F32:
        """Advance each sequence by the same number of tokens.

        x: float32 (sequences * tokens, hidden), sequence by sequence; gives the same shape.
        """
        config, weights = self._config, self._weights
        grid = (len(states), len(x) // len(states))
        columns = weights.qkv(x).reshape(*grid, 3 * config.width)
        mixed = self._pool.conv([state.conv for state in states], columns, weights.taps)
        parts = mixed.reshape(*grid, 3, config.num_heads, config.head_dim)
        queries_keys = unit_length(parts[:, :, :2])
        forget = weights.forget_b(weights.forget_a(x)).reshape(-1, config.num_heads, config.head_dim)
        decay = sigmoid(weights.decay_rate * (forget + weights.dt_bias)) * np.float32(config.gate_lower_bound)
        out = self._pool.kda(
            [state.matrix for state in states],
            queries_keys[:, :, 0] * np.float32(config.head_dim**-0.5),
            np.ascontiguousarray(queries_keys[:, :, 1]),
            np.ascontiguousarray(parts[:, :, 2]),
            decay.reshape(*grid, config.num_heads, config.head_dim),
            sigmoid(weights.beta(x)).reshape(*grid, config.num_heads),
        )
        normed = weights.output_norm(out.reshape(-1, config.head_dim)).reshape(len(x), -1)
        normed *= sigmoid(weights.gate_b(weights.gate_a(x)))
        return weights.output(normed)
