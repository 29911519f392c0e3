"""The demo model for training: GLM-5.3-Flash's architecture in plain PyTorch, packed documents in rows.

Formulas and names are the architecture's (config.json and checkpoint of zai-org/GLM-5.3-Flash); the test
beside this file compares it with the implementation in transformers. Precision: parameters fp32, matrix
products in autocast's bf16 on a GPU; residual streams, hyper-connections, gates, norms and router fp32.

Rows hold several documents. A document starts at a multiple of index_kpool, so that pools never cross a
border.

Attention is the real sparse one. Its selection has no gradient: the indexer learns from a KL loss to the
attention's own mass per pool. weight_noise imitates quantisation: every matrix that EXL3 will store is used
with Gaussian noise of its rounding error's size, so that the model learns to do without the lost bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.demo.shape import KDA, Shape

Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q, k, v, g, beta, starts) -> o; all (1, tokens, heads, dim) but beta (1, tokens, heads)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where documents lie in rows. doc, position: int64 (rows, tokens); starts: int32 cumulative, flat."""

    doc: Tensor
    position: Tensor
    starts: Tensor


def make_packing(doc: Tensor) -> Packing:
    """Derive positions and flat starts from document numbers (rows, tokens), which change at each border."""
    rows, tokens = doc.shape
    is_start = torch.ones_like(doc, dtype=torch.bool)
    is_start[:, 1:] = doc[:, 1:] != doc[:, :-1]
    index = torch.arange(tokens, device=doc.device).expand(rows, tokens)
    position = index - torch.where(is_start, index, 0).cummax(1).values
    starts = is_start.flatten().nonzero().flatten()
    end = torch.tensor([rows * tokens], device=doc.device)
    return Packing(doc, position, torch.cat([starts, end]).to(torch.int32))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the last axis in fp32; the result is fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """The delta rule token by token (slow, differentiable): the definition the kernels are checked
    against."""
    state = torch.zeros(q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=q.device)
    begin = set(starts.tolist())
    outputs = []
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    for t in range(q.shape[1]):
        if t in begin:
            state = torch.zeros_like(state)
        state = state * g[0, t].exp()[:, :, None]
        seen = torch.einsum("hkv,hk->hv", state, k[0, t])
        delta = beta[0, t, :, None] * (v[0, t].float() - seen)
        state = state + k[0, t][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[0, t]) * q.shape[3] ** -0.5)
    return torch.stack(outputs)[None]


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Make (tokens, 4, 4) mixing matrices doubly stochastic; fp32."""
    c = logits.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def mix_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams'[j] = post[j] y + sum over i of comb[i, j] streams[i]; (tokens, streams, hidden) fp32."""
    mixed = post[:, :, None] * y[:, None, :].float()
    for i in range(streams.shape[1]):
        mixed = mixed + comb[:, i, :, None] * streams[:, i, None, :]
    return mixed


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre[:, :, None] * streams).sum(1)


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """SwiGLU with GLM's clamps: the gate from above, up on both sides."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def gated_experts(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Gate and weight all experts; gate, up (tokens, experts * width), weights (tokens, experts)."""
    act = gated(gate, up, limit).unflatten(1, (weights.shape[1], -1))
    return (act * weights[:, :, None].to(act.dtype)).flatten(1)


def short_conv(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Causal depthwise convolution over flat tokens (tokens, channels), then SiLU; taps stay in the
    document."""
    taps = weight.shape[1]
    y = x * weight[:, taps - 1]
    for back in range(1, taps):
        shifted = F.pad(x, (0, 0, back, 0))[: x.shape[0]]
        y = y + torch.where((position >= back)[:, None], shifted, 0) * weight[:, taps - 1 - back]
    return F.silu(y)


@dataclass(slots=True)
class Functions:
    """The parts that a GPU run replaces by kernels or compiled code. Filled by the trainer."""

    kda: Kda = recurrent_kda
    sinkhorn: Callable[[Tensor, int, float], Tensor] = sinkhorn
    mix_streams: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = mix_streams
    collapse_streams: Callable[[Tensor, Tensor], Tensor] = collapse_streams
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor] = rms_norm
    gated_experts: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gated_experts
    short_conv: Callable[[Tensor, Tensor, Tensor], Tensor] = short_conv


@dataclass(slots=True)
class Run:
    """What one forward pass needs and gathers.

    noise: scale of the weight noise (1 = as large as the rounding error). index_rows: rows whose indexer is
    trained. index_losses: one scalar per DSA layer. loads: picks per expert, one (experts) tensor per MoE
    layer.
    """

    functions: Functions
    packing: Packing
    noise: float = 0.0
    index_rows: int = 0
    index_losses: list[Tensor] | None = None
    loads: list[Tensor] | None = None


class QuantLinear(nn.Module):
    """A matrix (or a stack of them) that EXL3 stores with `bits` per weight. weight: fp32 (..., out, in)."""

    def __init__(self, *sizes: int, bits: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*sizes) * scale / math.sqrt(sizes[-1]))
        self.bits = bits

    def noisy(self, run: Run) -> Tensor:
        """Give the weight as quantisation may leave it: relative error 2^-bits (a Gaussian source at rate
        R)."""
        if run.noise == 0.0:
            return self.weight
        with torch.no_grad():
            size = run.noise * 2.0**-self.bits * self.weight.square().mean((-1, -2), keepdim=True).sqrt()
            error = torch.randn_like(self.weight) * size
        return self.weight + error

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return F.linear(x, self.noisy(run))


class Plain(nn.Module):
    """A matrix that stays 16 bit. weight: fp32 (out, in)."""

    def __init__(self, out_features: int, in_features: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * scale / math.sqrt(in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class HyperConnection(nn.Module):
    """One mHC site: how the four streams feed a block and take its output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n = shape.hc_mult
        self.shape = shape
        self.fn = nn.Parameter(torch.randn((2 + n) * n, n * shape.hidden) * 0.01)
        base = torch.zeros((2 + n) * n)
        base[: 2 * n] = torch.randn(2 * n) * 0.5
        base[2 * n :] = (3.0 * torch.eye(n)).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, streams: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """streams fp32 (tokens, n, hidden) -> post (tokens, n), comb (tokens, n, n), input (tokens,
        hidden)."""
        s, n = self.shape, self.shape.hc_mult
        with torch.autocast(streams.device.type, enabled=False):
            flat = streams.flatten(1)
            mean_square = torch.linalg.vector_norm(flat, dim=1, keepdim=True).square() / flat.shape[1]
            m = F.linear(flat, self.fn) * torch.rsqrt(mean_square + s.norm_eps)
            pre = torch.sigmoid(m[:, :n] * self.scale[0] + self.base[:n]) + s.hc_eps
            post = 2 * torch.sigmoid(m[:, n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
            logits = (m[:, 2 * n :] * self.scale[2] + self.base[2 * n :]).unflatten(1, (n, n))
            comb = run.functions.sinkhorn(logits, s.hc_iters, s.hc_eps)
            return post, comb, run.functions.collapse_streams(streams, pre)


class KdaAttention(nn.Module):
    """Kimi delta attention with a short convolution and a bounded per-channel gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.kda_heads * shape.kda_dim
        self.shape = shape
        self.qkv_proj = QuantLinear(3 * width, shape.hidden, bits=5)
        self.o_proj = QuantLinear(shape.hidden, width, bits=5, scale=0.3)
        self.conv = nn.Parameter(torch.randn(3 * width, shape.conv_taps) * 0.1)
        self.b_proj = Plain(shape.kda_heads, shape.hidden)
        self.f_a_proj, self.f_b_proj = Plain(shape.kda_dim, shape.hidden), Plain(width, shape.kda_dim)
        self.g_a_proj, self.g_b_proj = Plain(shape.kda_dim, shape.hidden), Plain(width, shape.kda_dim)
        self.a_log = nn.Parameter(torch.zeros(shape.kda_heads))
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-6.0, -0.5))
        self.o_norm = nn.Parameter(torch.ones(shape.kda_dim))
        with torch.no_grad():
            self.conv[:, -1] += 1.0

    def forward(self, x: Tensor, run: Run) -> Tensor:
        """x (tokens, hidden) -> (tokens, hidden)."""
        heads, dim = self.shape.kda_heads, self.shape.kda_dim
        qkv = run.functions.short_conv(self.qkv_proj(x, run), self.conv, run.packing.position.flatten())
        q, k, v = (part.unflatten(1, (heads, dim))[None] for part in qkv.chunk(3, dim=1))
        z = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        g = self.shape.gate_lower_bound * torch.sigmoid(
            self.a_log.exp()[:, None] * z.unflatten(1, (heads, dim))
        )
        beta = torch.sigmoid(self.b_proj(x).float())
        o = run.functions.kda(q, k, v, g[None], beta[None], run.packing.starts)[0]
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(1, (heads, dim))
        o = run.functions.rms_norm(o, self.o_norm, self.shape.norm_eps) * torch.sigmoid(gate.float())
        return self.o_proj(o.flatten(1), run)


class Indexer(nn.Module):
    """Scores pools of four tokens for each query; the best are attended."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = QuantLinear(shape.index_heads * shape.index_dim, shape.q_lora, bits=5)
        self.wk = Plain(shape.index_dim, shape.hidden)
        self.k_norm = nn.LayerNorm(shape.index_dim, eps=1e-6)
        self.weights_proj = Plain(shape.index_heads, shape.hidden)
        self.ape = nn.Parameter(torch.zeros(shape.index_kpool, shape.index_dim))
        self.gate = nn.Parameter(torch.randn(shape.index_dim, shape.hidden) * 0.02)

    def scores(self, x: Tensor, r: Tensor, run: Run) -> Tensor:
        """x (rows, tokens, hidden), r (rows, tokens, q_lora) -> fp32 (rows, tokens, pools)."""
        s = self.shape
        q = self.wq_b(r, run).unflatten(-1, (s.index_heads, s.index_dim))
        k = self.k_norm(self.wk(x).float()).unflatten(1, (-1, s.index_kpool))
        share = (F.linear(x, self.gate).float().unflatten(1, (-1, s.index_kpool)) + self.ape).softmax(2)
        pooled = (share * k).sum(2)
        weights = self.weights_proj(x).float() * s.index_heads**-0.5
        total = torch.zeros(1, device=x.device)
        for head in range(s.index_heads):
            match = torch.einsum("rtd,rpd->rtp", q[:, :, head].to(pooled.dtype), pooled)
            total = total + weights[:, :, head, None] * F.relu(match.float() * s.index_dim**-0.5)
        return total


def candidate_pools(packing: Packing, kpool: int) -> Tensor:
    """Say which pools a query may choose: complete, visible, of its document; bool (rows, tokens, pools)."""
    index = torch.arange(packing.doc.shape[1], device=packing.doc.device)
    pool_doc = packing.doc[:, ::kpool]
    visible = index[kpool - 1 :: kpool][None, :] <= index[:, None]
    return visible & (pool_doc[:, None, :] == packing.doc[:, :, None])


def attended(chosen: Tensor, packing: Packing, kpool: int) -> Tensor:
    """Give the attention mask, bool (rows, tokens, keys): chosen pools and the tail behind the last whole
    pool."""
    index = torch.arange(packing.doc.shape[1], device=packing.doc.device)
    tail = (index[None, :] <= index[:, None]) & (index[None, :] // kpool == (index[:, None] + 1) // kpool)
    same = packing.doc[:, None, :] == packing.doc[:, :, None]
    return chosen.repeat_interleave(kpool, dim=2) | (tail & same)


class DsaAttention(nn.Module):
    """Multi-head latent attention without rotation, over the indexer's choice."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = QuantLinear(shape.q_lora, shape.hidden, bits=5)
        self.q_a_layernorm = nn.Parameter(torch.ones(shape.q_lora))
        self.q_b_proj = QuantLinear(shape.heads * shape.nope_dim, shape.q_lora, bits=5)
        self.kv_a_proj_with_mqa = QuantLinear(shape.kv_lora, shape.hidden, bits=5)
        self.kv_a_layernorm = nn.Parameter(torch.ones(shape.kv_lora))
        self.kv_b_proj = Plain(shape.heads * (shape.nope_dim + shape.v_dim), shape.kv_lora)
        self.o_proj = QuantLinear(shape.hidden, shape.heads * shape.v_dim, bits=5, scale=0.3)
        self.indexer = Indexer(shape)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        """x (tokens, hidden) -> (tokens, hidden)."""
        s = self.shape
        rows = x.unflatten(0, run.packing.doc.shape)
        r = run.functions.rms_norm(self.q_a_proj(rows, run), self.q_a_layernorm, s.norm_eps)
        c = run.functions.rms_norm(self.kv_a_proj_with_mqa(rows, run), self.kv_a_layernorm, s.norm_eps)
        q = self.q_b_proj(r, run).unflatten(-1, (s.heads, s.nope_dim)).transpose(1, 2)
        kv = self.kv_b_proj(c).unflatten(-1, (s.heads, s.nope_dim + s.v_dim)).transpose(1, 2)
        k, v = kv.split([s.nope_dim, s.v_dim], dim=-1)
        candidates = candidate_pools(run.packing, s.index_kpool)
        chosen = self._choose(rows, r, candidates, run)
        mask = attended(chosen, run.packing, s.index_kpool)[:, None]
        o = F.scaled_dot_product_attention(q, k, v.contiguous(), attn_mask=mask)
        if run.index_rows and run.index_losses is not None:
            n = run.index_rows
            run.index_losses.append(self._index_loss(rows[:n], r[:n], q[:n], k[:n], candidates[:n], run))
        return self.o_proj(o.transpose(1, 2).flatten(2).flatten(0, 1), run)

    def _choose(self, rows: Tensor, r: Tensor, candidates: Tensor, run: Run) -> Tensor:
        s = self.shape
        keep = s.index_topk // s.index_kpool
        if int(run.packing.position.max()) < s.index_topk + s.index_kpool - 1:
            return candidates
        with torch.no_grad():
            scores = self.indexer.scores(rows, r, run).masked_fill(~candidates, -torch.inf)
            best = scores.topk(min(keep, scores.shape[2]), dim=2).indices
            chosen = torch.zeros_like(candidates).scatter_(2, best, True)
        return chosen & candidates

    def _index_loss(
        self, rows: Tensor, r: Tensor, q: Tensor, k: Tensor, candidates: Tensor, run: Run
    ) -> Tensor:
        """KL of the indexer's softmax over pools to the dense attention's mass per pool, mean over
        queries."""
        s = self.shape
        doc = run.packing.doc[: rows.shape[0]]
        with torch.no_grad():
            index = torch.arange(doc.shape[1], device=doc.device)
            visible = (doc[:, None, :] == doc[:, :, None]) & (index[None, :] <= index[:, None])
            logits = (q @ k.transpose(-1, -2)).float() * s.nope_dim**-0.5
            mass = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).mean(1)
            mass = mass.unflatten(-1, (-1, s.index_kpool)).sum(-1) * candidates
            target = mass / (mass.sum(-1, keepdim=True) + 1e-9)
        scores = self.indexer.scores(rows.detach(), r.detach(), run).masked_fill(~candidates, -1e9)
        log_share = scores.log_softmax(-1)
        divergence = torch.where(target > 0, target * (target.clamp_min(1e-9).log() - log_share), 0).sum(-1)
        active = candidates.sum(-1) > 1
        return (divergence * active).sum() / active.sum().clamp_min(1)


class DenseMlp(nn.Module):
    """One gated MLP."""

    def __init__(self, shape: Shape, width: int, bits: int) -> None:
        super().__init__()
        self.limit = shape.swiglu_limit
        self.gate_proj = QuantLinear(width, shape.hidden, bits=bits)
        self.up_proj = QuantLinear(width, shape.hidden, bits=bits)
        self.down_proj = QuantLinear(shape.hidden, width, bits=bits, scale=0.3)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x, run), self.up_proj(x, run), self.limit), run)


class SparseMlp(nn.Module):
    """Routed experts and a shared one. All experts are computed and weighted: exact, and fast at this
    size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        e, m, h = shape.num_experts, shape.moe_intermediate, shape.hidden
        self.shape = shape
        self.gate = Plain(e, h)
        self.bias = nn.Buffer(torch.zeros(e))
        self.gate_proj = QuantLinear(e, m, h, bits=3)
        self.up_proj = QuantLinear(e, m, h, bits=3)
        self.down_proj = QuantLinear(e, h, m, bits=3, scale=0.3)
        self.shared_experts = DenseMlp(shape, m, bits=5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give weights (tokens, experts), zero where not picked, and picks (tokens, top_k)."""
        with torch.autocast(x.device.type, enabled=False):
            p = torch.sigmoid(self.gate(x.float()))
        picks = (p.detach() + self.bias).topk(self.shape.top_k, dim=1).indices
        picked = p.gather(1, picks)
        shares = picked / (picked.sum(1, keepdim=True) + 1e-20) * self.shape.routed_scaling
        return torch.zeros_like(p).scatter(1, picks, shares), picks

    def forward(self, x: Tensor, run: Run) -> Tensor:
        s = self.shape
        weights, picks = self.route(x)
        if run.loads is not None:
            run.loads.append(torch.bincount(picks.flatten(), minlength=s.num_experts))
        gate = F.linear(x, self.gate_proj.noisy(run).flatten(0, 1))
        up = F.linear(x, self.up_proj.noisy(run).flatten(0, 1))
        act = run.functions.gated_experts(gate, up, weights, s.swiglu_limit)
        down = self.down_proj.noisy(run).transpose(0, 1).flatten(1)
        return F.linear(act, down) + self.shared_experts(x, run)


class Block(nn.Module):
    """One layer of the trunk: attention site, then FFN site, each behind its hyper-connection."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.input_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.hc_attn, self.hc_ffn = HyperConnection(shape), HyperConnection(shape)
        self.self_attn = KdaAttention(shape) if shape.layer_types[index] == KDA else DsaAttention(shape)
        dense = index < shape.num_dense
        self.mlp = DenseMlp(shape, shape.intermediate, bits=4) if dense else SparseMlp(shape)

    def forward(self, streams: Tensor, run: Run) -> Tensor:
        f = run.functions
        post, comb, u = self.hc_attn(streams, run)
        y = self.self_attn(f.rms_norm(u, self.input_layernorm, self.eps), run)
        streams = f.mix_streams(streams, y, post, comb)
        post, comb, u = self.hc_ffn(streams, run)
        y = self.mlp(f.rms_norm(u, self.post_attention_layernorm, self.eps), run)
        return f.mix_streams(streams, y, post, comb)


class MtpLayer(nn.Module):
    """Predicts the token after the next from the trunk's output and the next token's embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.enorm, self.hnorm = (
            nn.Parameter(torch.ones(shape.hidden)),
            nn.Parameter(torch.ones(shape.hidden)),
        )
        self.eh_proj = QuantLinear(shape.hidden, 2 * shape.hidden, bits=3)
        self.input_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.self_attn = DsaAttention(shape)
        self.mlp = SparseMlp(shape)
        self.head_norm = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, hidden: Tensor, next_embedding: Tensor, run: Run) -> Tensor:
        """hidden: trunk output after its norm (tokens, hidden) -> input of the head."""
        norm = run.functions.rms_norm
        both = torch.cat(
            [norm(next_embedding, self.enorm, self.eps), norm(hidden, self.hnorm, self.eps)], dim=1
        )
        x = self.eh_proj(both, run).float()
        x = x + self.self_attn(norm(x, self.input_layernorm, self.eps), run)
        x = x + self.mlp(norm(x, self.post_attention_layernorm, self.eps), run)
        return norm(x, self.head_norm, self.eps)


class DemoModel(nn.Module):
    """Trunk, head and MTP layer. ids int64 (rows, tokens)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.3)
        self.layers = nn.ModuleList(Block(shape, index) for index in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.lm_head = QuantLinear(shape.vocab, shape.hidden, bits=6, scale=0.5)
        self.mtp = MtpLayer(shape)

    def trunk(self, ids: Tensor, run: Run) -> Tensor:
        """Give the head's input (tokens, hidden), rows flattened."""
        x = F.embedding(ids.flatten(), self.embed_tokens)
        streams = x[:, None, :].expand(-1, self.shape.hc_mult, -1).contiguous()
        for layer in self.layers:
            streams = layer(streams, run)
        return run.functions.rms_norm(streams.mean(1), self.norm, self.shape.norm_eps)

    def logits(self, hidden: Tensor, run: Run) -> Tensor:
        """fp32 (tokens, vocab)."""
        return self.lm_head(hidden, run).float()

    def mtp_hidden(self, ids: Tensor, hidden: Tensor, run: Run) -> Tensor:
        """Give the head's input for the token after the next; trunk and embedding are not trained by it."""
        following = F.embedding(ids.roll(-1, dims=1).flatten(), self.embed_tokens.detach())
        return self.mtp(hidden.detach(), following, run)
