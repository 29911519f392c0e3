"""The text model in float64, token by token and head by head: the oracle of glm53srv.model.

Written from the formulas alone (transformers 5.24, models/glm5_next, and the format's own description), with
none of the production code but the file reader: recurrences walk over tokens, attention expands keys and
values, pools are ranked by sorting. Slow; for a few hundred tokens of a small model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.model.checkpoint import Checkpoint, bfloat16_to_float32
from glm53srv.model.config import AttentionKind, MlpKind, ModelConfig, load_model_config
from reference import exl3

Float64 = NDArray[np.float64]
_PREFIX = "model.language_model"


class ReferenceModel:
    """A checkpoint's text model. Every method recomputes from scratch; nothing is cached."""

    def __init__(self, model_dir: Path) -> None:
        self.config: ModelConfig = load_model_config(model_dir)
        self._checkpoint = Checkpoint(model_dir)

    def embed(self, token_ids: list[int]) -> Float64:
        """Give the streams (tokens, 4, hidden)."""
        rows = self._tensor(f"{_PREFIX}.embed_tokens.weight")[token_ids]
        return np.stack([rows] * self.config.hc.num_streams, axis=1)

    def logits(self, streams: Float64) -> Float64:
        """Give the logits (tokens, vocab) from the streams after the last block."""
        h = rms(streams.mean(axis=1), self.config.rms_norm_eps) * self._tensor(f"{_PREFIX}.norm.weight")
        return self._linear(h, "lm_head")

    def forward(self, token_ids: list[int]) -> Float64:
        """Give the logits (tokens, vocab) of one sequence."""
        streams = self.embed(token_ids)
        for layer in range(self.config.num_layers):
            streams = self.block(layer, streams)
        return self.logits(streams)

    def block(self, layer: int, streams: Float64) -> Float64:
        """Run one block over a whole sequence, streams (tokens, 4, hidden)."""
        name = f"{_PREFIX}.layers.{layer}"
        x, post, comb = self._site(f"{name}.hc_attn", streams)
        x = rms(x, self.config.rms_norm_eps) * self._tensor(f"{name}.input_layernorm.weight")
        is_kda = self.config.attention_kinds[layer] is AttentionKind.KDA
        y = self._kda(f"{name}.self_attn", x) if is_kda else self._mla(f"{name}.self_attn", x)
        streams = _write(streams, post, comb, y)
        x, post, comb = self._site(f"{name}.hc_ffn", streams)
        x = rms(x, self.config.rms_norm_eps) * self._tensor(f"{name}.post_attention_layernorm.weight")
        is_dense = self.config.mlp_kinds[layer] is MlpKind.DENSE
        y = self._mlp(f"{name}.mlp", x) if is_dense else self._moe(f"{name}.mlp", x)
        return _write(streams, post, comb, y)

    def cut_gaps(self, layer: int, streams: Float64) -> Float64:
        """Tell how clearly each position's pools are chosen in an attention layer; (tokens,).

        The score of the worst chosen pool minus that of the best one left out, relative to the largest score;
        inf where nothing is left out. A gap of rounding size means that either choice is right.
        """
        name = f"{_PREFIX}.layers.{layer}"
        x = self._site(f"{name}.hc_attn", streams)[0]
        x = rms(x, self.config.rms_norm_eps) * self._tensor(f"{name}.input_layernorm.weight")
        scores = self._pool_scores(f"{name}.self_attn", x)
        count = self.config.indexer.topk_pools
        gaps = np.full(len(x), np.inf)
        for position in range(len(x)):
            visible = np.sort(scores[position, : (position + 1) // self.config.indexer.kpool])[::-1]
            if len(visible) > count:
                gaps[position] = (visible[count - 1] - visible[count]) / np.abs(visible).max()
        return gaps

    def _tensor(self, name: str) -> Float64:
        info = self._checkpoint.info(name)
        array: NDArray[Any] = self._checkpoint.raw(name, info.shape, (info.dtype,))
        return (bfloat16_to_float32(array) if info.dtype == "BF16" else array).astype(np.float64)

    def _stored(self, key: str) -> exl3.Exl3Tensors:
        trellis = self._checkpoint.info(f"{key}.trellis")
        raw = self._checkpoint.raw(f"{key}.trellis", trellis.shape, ("I16",)).view(np.uint16)
        suh, svh = self._tensor(f"{key}.suh"), self._tensor(f"{key}.svh")
        return exl3.Exl3Tensors(raw, suh.astype(np.float16), svh.astype(np.float16), "mul1")

    def _linear(self, x: Float64, key: str) -> Float64:
        if f"{key}.trellis" in self._checkpoint:
            return exl3.linear(x, self._stored(key))
        return x @ self._tensor(f"{key}.weight").T

    def _site(self, name: str, streams: Float64) -> tuple[Float64, Float64, Float64]:
        """Give what a site reads (tokens, hidden), post (tokens, n) and comb (tokens, n, n)."""
        hc, n = self.config.hc, self.config.hc.num_streams
        base, scale = self._tensor(f"{name}_base"), self._tensor(f"{name}_scale")
        flat = rms(streams.reshape(len(streams), -1), self.config.rms_norm_eps)
        m = flat @ self._tensor(f"{name}_fn").T
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + hc.eps
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = np.exp(m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        comb = comb / comb.sum(axis=2, keepdims=True) + hc.eps
        comb = comb / (comb.sum(axis=1, keepdims=True) + hc.eps)
        for _ in range(hc.sinkhorn_iters - 1):
            comb = comb / (comb.sum(axis=2, keepdims=True) + hc.eps)
            comb = comb / (comb.sum(axis=1, keepdims=True) + hc.eps)
        return np.einsum("tn,tnh->th", pre, streams), post, comb

    def _kda(self, name: str, x: Float64) -> Float64:
        kda, tokens = self.config.kda, len(x)
        shape = (tokens, kda.num_heads, kda.head_dim)
        padded = np.concatenate(
            [np.zeros((kda.conv_kernel - 1, 3 * kda.width)), self._linear(x, f"{name}.qkv_proj")]
        )
        taps = self._tensor(f"{name}.conv1d.weight")[:, 0]
        mixed = silu(np.sum([padded[i : i + tokens] * taps[:, i] for i in range(kda.conv_kernel)], axis=0))
        q, k, v = (part.reshape(shape) for part in np.split(mixed, 3, axis=1))
        q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * kda.head_dim**-0.5
        k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
        z = self._linear(self._linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj") + self._tensor(
            f"{name}.dt_bias"
        )
        rate = np.exp(self._tensor(f"{name}.A_log"))[:, None]
        g = kda.gate_lower_bound * sigmoid(rate * z.reshape(shape))
        beta = sigmoid(self._linear(x, f"{name}.b_proj"))
        state = np.zeros((kda.num_heads, kda.head_dim, kda.head_dim))
        o = kda_recurrence(q, k, v, g, beta, state)
        gate = sigmoid(self._linear(self._linear(x, f"{name}.g_a_proj"), f"{name}.g_b_proj"))
        o = rms(o, self.config.rms_norm_eps) * self._tensor(f"{name}.o_norm.weight")
        return self._linear(o.reshape(tokens, -1) * gate, f"{name}.o_proj")

    def _pool_scores(self, name: str, x: Float64) -> Float64:
        """Give the score of every complete pool for every position, (tokens, pools), visible or not."""
        indexer, name_i = self.config.indexer, f"{name}.indexer"
        r = rms(self._linear(x, f"{name}.q_a_proj"), self.config.rms_norm_eps) * self._tensor(
            f"{name}.q_a_layernorm.weight"
        )
        q = self._linear(r, f"{name_i}.wq_b").reshape(len(x), indexer.num_heads, indexer.head_dim)
        k = self._linear(x, f"{name_i}.wk")
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * self._tensor(f"{name_i}.k_norm.weight") + self._tensor(f"{name_i}.k_norm.bias")
        s = x @ self._tensor(f"{name_i}.index_kpool_compress_gate").T
        ape = self._tensor(f"{name_i}.index_kpool_compress_ape")
        w = self._linear(x, f"{name_i}.weights_proj") * indexer.num_heads**-0.5
        pools = []
        for first in range(0, len(x) // indexer.kpool * indexer.kpool, indexer.kpool):
            share = np.exp(s[first : first + indexer.kpool] + ape)
            pools.append((share / share.sum(axis=0) * k[first : first + indexer.kpool]).sum(axis=0))
        pooled = np.array(pools).reshape(-1, indexer.head_dim)
        products = np.einsum("thd,pd->thp", q, pooled) * indexer.head_dim**-0.5
        return np.asarray(np.einsum("th,thp->tp", w, np.maximum(products, 0)), np.float64)

    def _selected(self, scores: Float64, position: int) -> list[int]:
        """Give the tokens that a position reads: its best pools, the lowest index first among equals, and the
        tail."""
        kpool, num_visible = self.config.indexer.kpool, position + 1
        pools = range(num_visible // kpool)
        best = sorted(pools, key=lambda p: (-scores[position, p], p))[: self.config.indexer.topk_pools]
        members = [kpool * p + i for p in best for i in range(kpool)]
        return members + list(range(len(pools) * kpool, num_visible))

    def _mla(self, name: str, x: Float64) -> Float64:
        mla, eps, tokens = self.config.mla, self.config.rms_norm_eps, len(x)
        r = rms(self._linear(x, f"{name}.q_a_proj"), eps) * self._tensor(f"{name}.q_a_layernorm.weight")
        q = self._linear(r, f"{name}.q_b_proj").reshape(tokens, mla.num_heads, mla.nope_head_dim)
        c = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        c = rms(c, eps) * self._tensor(f"{name}.kv_a_layernorm.weight")
        kv = (c @ self._tensor(f"{name}.kv_b_proj.weight").T).reshape(tokens, mla.num_heads, -1)
        keys, values = kv[..., : mla.nope_head_dim], kv[..., mla.nope_head_dim :]
        scores = self._pool_scores(name, x)
        out = np.empty((tokens, mla.num_heads, mla.v_head_dim))
        for position in range(tokens):
            read = self._selected(scores, position)
            weights = np.exp(np.einsum("hd,thd->ht", q[position], keys[read]) * mla.nope_head_dim**-0.5)
            weights /= weights.sum(axis=1, keepdims=True)
            out[position] = np.einsum("ht,thd->hd", weights, values[read])
        return self._linear(out.reshape(tokens, -1), f"{name}.o_proj")

    def _mlp(self, name: str, x: Float64) -> Float64:
        gate, up, down = (self._stored(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        return exl3.gated_expert(x, gate, up, down, self.config.swiglu_limit)

    def _moe(self, name: str, x: Float64) -> Float64:
        moe = self.config.moe
        p = sigmoid(x @ self._tensor(f"{name}.gate.weight").T)
        bias = self._tensor(f"{name}.gate.e_score_correction_bias")
        y = self._mlp(f"{name}.shared_experts", x)
        share = np.zeros_like(p)
        for token in range(len(x)):
            picks = sorted(range(moe.num_experts), key=lambda e: (-(p[token, e] + bias[e]), e))[: moe.top_k]
            share[token, picks] = p[token, picks] / (p[token, picks].sum() + 1e-20) * moe.weight_scale
        for expert in range(moe.num_experts):
            tokens = np.flatnonzero(share[:, expert])
            if len(tokens):
                y[tokens] += share[tokens, expert, None] * self._mlp(f"{name}.experts.{expert}", x[tokens])
        return y


def kda_recurrence(q: Float64, k: Float64, v: Float64, g: Float64, beta: Float64, state: Float64) -> Float64:
    """Walk over tokens: q, k, v, g (tokens, heads, d), beta (tokens, heads); state (heads, d, d) in place."""
    out = np.empty_like(v)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            s = state[head]
            s *= np.exp(g[token, head])[:, None]
            delta = beta[token, head] * (v[token, head] - s.T @ k[token, head])
            s += np.outer(k[token, head], delta)
            out[token, head] = s.T @ q[token, head]
    return out


def rms(x: Float64, eps: float) -> Float64:
    """Scale rows to root mean square 1."""
    scaled: Float64 = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return scaled


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + e^-x)."""
    y: Float64 = 1 / (1 + np.exp(-x))
    return y


def silu(x: Float64) -> Float64:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def _write(streams: Float64, post: Float64, comb: Float64, y: Float64) -> Float64:
    mixed: Float64 = np.einsum("tij,tih->tjh", comb, streams)
    return post[:, :, None] * y[:, None, :] + mixed
