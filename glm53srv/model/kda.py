"""KDA: linear attention with a delta rule and a decay per key channel.

One token, per head, with the state S (keys x values) and log decays g:

    S = diag(e^g) S;   delta = beta (v - S^T k);   S = S + k delta^T;   o = S^T q

Prefill computes the same in blocks: inside a block the deltas solve a unit lower triangular system, so that a
block costs a few products instead of a walk over its tokens (the WY form of the gated delta rule: Yang et
al., "Gated Delta Networks", 2024; per-channel decay: Kimi Linear, 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53srv.model.config import KdaConfig
from glm53srv.model.linear import Linear
from glm53srv.model.ops import F32, rms_norm, sigmoid, silu, unit_length
from glm53srv.model.state import KdaState

# Inside a block, decays are applied as e^(G - M) and e^(M - G) around the block's middle; each exponent must
# stay far from float32's 87 so that neither factor leaves the normal range.
_MAX_EXPONENT = 40.0


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """The parts of one layer. conv: (3 width, conv_kernel), taps from oldest to newest. decay_rate: e^A_log,
    (heads, 1). dt_bias: (heads, head_dim). o_norm: (head_dim,). All float32."""

    qkv: Linear
    conv: F32
    forget_a: Linear
    forget_b: Linear
    decay_rate: F32
    dt_bias: F32
    beta: Linear
    gate_a: Linear
    gate_b: Linear
    o_norm: F32
    output: Linear


@dataclass(frozen=True, slots=True)
class _Inputs:
    """q, k, v, log_decay: (rows, heads, head_dim). beta: (rows, heads)."""

    q: F32
    k: F32
    v: F32
    log_decay: F32
    beta: F32


class KdaAttention:
    """One linear attention layer. Stateless: the state comes with each call and is updated in place."""

    def __init__(self, config: KdaConfig, weights: KdaWeights, norm_eps: float) -> None:
        self._config = config
        self._weights = weights
        self._norm_eps = norm_eps

    def prefill(self, x: F32, state: KdaState) -> F32:
        """Advance one sequence by the tokens x (rows, hidden); gives (rows, hidden)."""
        columns = self._weights.qkv(x)
        mixed = _convolve(columns, state.conv, self._weights.conv)
        inputs = self._inputs(x, mixed)
        out = kda_blocks(
            inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, state.matrix, self._block
        )
        return self._finish(x, out)

    def decode(self, x: F32, states: Sequence[KdaState]) -> F32:
        """Advance len(states) sequences by one token each, x (rows, hidden); gives (rows, hidden)."""
        columns = self._weights.qkv(x)
        mixed = np.concatenate(
            [_convolve(columns[i : i + 1], state.conv, self._weights.conv) for i, state in enumerate(states)]
        )
        inputs = self._inputs(x, mixed)
        out = np.empty_like(inputs.v)
        for i, state in enumerate(states):
            out[i] = kda_step(
                inputs.q[i], inputs.k[i], inputs.v[i], inputs.log_decay[i], inputs.beta[i], state.matrix
            )
        return self._finish(x, out)

    @property
    def _block(self) -> int:
        return max(1, int(-2 * _MAX_EXPONENT / self._config.gate_lower_bound))

    def _inputs(self, x: F32, mixed: F32) -> _Inputs:
        config, weights = self._config, self._weights
        rows = len(x)
        q, k, v = (
            part.reshape(rows, config.num_heads, config.head_dim) for part in np.split(mixed, 3, axis=1)
        )
        forget = weights.forget_b(weights.forget_a(x)).reshape(rows, config.num_heads, config.head_dim)
        log_decay = np.float32(config.gate_lower_bound) * sigmoid(
            weights.decay_rate * (forget + weights.dt_bias)
        )
        return _Inputs(
            q=unit_length(q) * np.float32(config.head_dim**-0.5),
            k=unit_length(k),
            v=v,
            log_decay=log_decay,
            beta=sigmoid(weights.beta(x)),
        )

    def _finish(self, x: F32, out: F32) -> F32:
        """Norm and gate the heads' outputs (rows, heads, head_dim), and project them."""
        weights = self._weights
        gate = sigmoid(weights.gate_b(weights.gate_a(x)))
        normed = rms_norm(out, weights.o_norm, self._norm_eps)
        return weights.output(normed.reshape(len(x), -1) * gate)


def _convolve(columns: F32, history: F32, taps: F32) -> F32:
    """Causal depthwise convolution of columns (rows, channels), then silu; history is moved on in place."""
    rows, kernel = len(columns), taps.shape[1]
    extended = np.concatenate([history, columns])
    out = extended[:rows] * taps[:, 0]
    for tap in range(1, kernel):
        out += extended[tap : tap + rows] * taps[:, tap]
    history[:] = extended[rows:]
    return silu(out)


def kda_step(q: F32, k: F32, v: F32, log_decay: F32, beta: F32, matrix: F32) -> F32:
    """One token: q, k, v, log_decay (heads, d), beta (heads,) give (heads, d).

    matrix: (heads, d, d), updated in place.
    """
    matrix *= np.exp(log_decay)[:, :, None]
    delta = beta[:, None] * (v - np.matmul(k[:, None, :], matrix)[:, 0])
    matrix += k[:, :, None] * delta[:, None, :]
    return np.asarray(np.matmul(q[:, None, :], matrix)[:, 0], np.float32)


def kda_blocks(q: F32, k: F32, v: F32, log_decay: F32, beta: F32, matrix: F32, block: int) -> F32:
    """Many tokens: q, k, v, log_decay (rows, heads, d), beta (rows, heads); matrix (heads, d, d) in place.

    Gives (rows, heads, d). block: tokens per block; block / 2 * max|log_decay| must stay below about 40.
    """
    rows = len(q)
    block = min(block, rows)
    parts = [_to_blocks(part, block) for part in (q, k, v, log_decay)]
    queries, keys, values, decays = parts
    betas = _to_blocks(beta[:, :, None], block)
    total = np.cumsum(decays, axis=2, dtype=np.float32)
    middle = total[:, :, block // 2, None]
    grow = np.exp(total - middle)
    shrunk_keys = keys * np.exp(middle - total)
    lower = np.tril(np.ones((block, block), np.float32))
    strict = np.tril(lower, -1)
    # decay from token j to token i is e^(total_i - total_j): 1 or less wherever j <= i
    key_key = (keys * grow) @ shrunk_keys.swapaxes(2, 3) * strict
    query_key = (queries * grow) @ shrunk_keys.swapaxes(2, 3) * lower
    solve = np.linalg.inv(np.eye(block, dtype=np.float32) + betas * key_key)
    from_start = np.exp(total)
    to_end = np.exp(total[:, :, -1:] - total)
    keys_from_start, queries_from_start = keys * from_start, queries * from_start
    keys_to_end = (keys * to_end).swapaxes(2, 3)
    out = np.empty_like(values)
    for i in range(len(values)):
        deltas = solve[i] @ (betas[i] * (values[i] - keys_from_start[i] @ matrix))
        out[i] = queries_from_start[i] @ matrix + query_key[i] @ deltas
        matrix *= from_start[i, :, -1, :, None]
        matrix += keys_to_end[i] @ deltas
    return np.ascontiguousarray(out.transpose(0, 2, 1, 3).reshape(-1, *v.shape[1:])[:rows])


def _to_blocks(values: F32, block: int) -> F32:
    """Give (rows, heads, d) as (blocks, heads, block, d), the last one filled up with neutral zeros."""
    rows, heads, d = values.shape
    num_blocks = -(-rows // block)
    if num_blocks * block != rows:
        values = np.concatenate([values, np.zeros((num_blocks * block - rows, heads, d), np.float32)])
    return np.ascontiguousarray(values.reshape(num_blocks, block, heads, d).transpose(0, 2, 1, 3))
