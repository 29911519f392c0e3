"""Elementwise parts of the training model as Triton kernels: one pass over memory instead of a dozen.

Each has its definition in model.py; kernels.check_functions compares them before a run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_EXPERTS = 8
"""Experts per program of the gating kernels."""


@triton.jit
def _mix_kernel(s_ptr, y_ptr, post_ptr, comb_ptr, out_ptr, H: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 4)
    h = tl.arange(0, H)
    s = tl.load(s_ptr + t * 4 * H + i[:, None] * H + h[None, :])
    y = tl.load(y_ptr + t * H + h).to(tl.float32)
    for j in tl.static_range(4):
        column = tl.load(comb_ptr + t * 16 + i * 4 + j)
        post = tl.load(post_ptr + t * 4 + j)
        tl.store(out_ptr + t * 4 * H + j * H + h, post * y + tl.sum(column[:, None] * s, 0))


@triton.jit
def _mix_back_kernel(
    s_ptr, y_ptr, post_ptr, comb_ptr, d_ptr, ds_ptr, dy_ptr, dpost_ptr, dcomb_ptr, H: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 4)
    h = tl.arange(0, H)
    s = tl.load(s_ptr + t * 4 * H + i[:, None] * H + h[None, :])
    y = tl.load(y_ptr + t * H + h).to(tl.float32)
    ds = tl.zeros((4, H), tl.float32)
    dy = tl.zeros((H,), tl.float32)
    for j in tl.static_range(4):
        d = tl.load(d_ptr + t * 4 * H + j * H + h)
        column = tl.load(comb_ptr + t * 16 + i * 4 + j)
        ds += column[:, None] * d[None, :]
        dy += tl.load(post_ptr + t * 4 + j) * d
        tl.store(dpost_ptr + t * 4 + j, tl.sum(d * y, 0))
        tl.store(dcomb_ptr + t * 16 + i * 4 + j, tl.sum(s * d[None, :], 1))
    tl.store(ds_ptr + t * 4 * H + i[:, None] * H + h[None, :], ds)
    tl.store(dy_ptr + t * H + h, dy.to(dy_ptr.dtype.element_ty))


class _MixStreams(torch.autograd.Function):
    """streams (tokens, 4, hidden) fp32, y (tokens, hidden), post (tokens, 4) fp32, comb (tokens, 4, 4)
    fp32."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        inputs = [x.contiguous() for x in (streams, y, post, comb)]
        out = torch.empty_like(inputs[0])
        _mix_kernel[(out.shape[0],)](*inputs, out, out.shape[2], num_warps=2)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        outs = [torch.empty_like(x) for x in inputs]
        size = inputs[0].shape
        _mix_back_kernel[(size[0],)](*inputs, grads[0].contiguous(), *outs, size[2], num_warps=2)
        return tuple(outs)


@triton.jit
def _collapse_kernel(s_ptr, pre_ptr, out_ptr, H: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 4)
    h = tl.arange(0, H)
    s = tl.load(s_ptr + t * 4 * H + i[:, None] * H + h[None, :])
    pre = tl.load(pre_ptr + t * 4 + i)
    tl.store(out_ptr + t * H + h, tl.sum(pre[:, None] * s, 0))


@triton.jit
def _collapse_back_kernel(s_ptr, pre_ptr, d_ptr, ds_ptr, dpre_ptr, H: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 4)
    h = tl.arange(0, H)
    place = t * 4 * H + i[:, None] * H + h[None, :]
    s = tl.load(s_ptr + place)
    pre = tl.load(pre_ptr + t * 4 + i)
    d = tl.load(d_ptr + t * H + h)
    tl.store(ds_ptr + place, pre[:, None] * d[None, :])
    tl.store(dpre_ptr + t * 4 + i, tl.sum(s * d[None, :], 1))


class _CollapseStreams(torch.autograd.Function):
    """streams (tokens, 4, hidden) fp32, pre (tokens, 4) fp32 -> (tokens, hidden)."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor) -> Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        out = torch.empty_like(streams[:, 0])
        _collapse_kernel[(out.shape[0],)](streams, pre, out, out.shape[1], num_warps=2)
        ctx.save_for_backward(streams, pre)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        streams, pre = ctx.saved_tensors
        ds, dpre = torch.empty_like(streams), torch.empty_like(pre)
        size = streams.shape
        _collapse_back_kernel[(size[0],)](streams, pre, grads[0].contiguous(), ds, dpre, size[2], num_warps=2)
        return ds, dpre


@triton.jit
def _gate_kernel(g_ptr, u_ptr, w_ptr, out_ptr, limit, E: tl.constexpr, M: tl.constexpr, B: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * B + tl.arange(0, B)
    place = t * E * M + e[:, None] * M + tl.arange(0, M)[None, :]
    g = tl.minimum(tl.load(g_ptr + place).to(tl.float32), limit)
    u = tl.minimum(tl.maximum(tl.load(u_ptr + place).to(tl.float32), -limit), limit)
    w = tl.load(w_ptr + t * E + e)
    tl.store(out_ptr + place, (g * tl.sigmoid(g) * u * w[:, None]).to(out_ptr.dtype.element_ty))


@triton.jit
def _gate_back_kernel(
    g_ptr,
    u_ptr,
    w_ptr,
    d_ptr,
    dg_ptr,
    du_ptr,
    dw_ptr,
    limit,
    E: tl.constexpr,
    M: tl.constexpr,
    B: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * B + tl.arange(0, B)
    place = t * E * M + e[:, None] * M + tl.arange(0, M)[None, :]
    raw_g, raw_u = tl.load(g_ptr + place).to(tl.float32), tl.load(u_ptr + place).to(tl.float32)
    g = tl.minimum(raw_g, limit)
    u = tl.minimum(tl.maximum(raw_u, -limit), limit)
    w = tl.load(w_ptr + t * E + e)[:, None]
    d = tl.load(d_ptr + place).to(tl.float32)
    s = tl.sigmoid(g)
    dg = tl.where(raw_g <= limit, d * w * u * s * (1 + g * (1 - s)), 0.0)
    du = tl.where((raw_u >= -limit) & (raw_u <= limit), d * w * g * s, 0.0)
    tl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty))
    tl.store(du_ptr + place, du.to(du_ptr.dtype.element_ty))
    tl.store(dw_ptr + t * E + e, tl.sum(d * g * s * u, 1))


class _GatedExperts(torch.autograd.Function):
    """gate, up (tokens, experts * width), weights fp32 (tokens, experts) -> as gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
        gate, up, weights = gate.contiguous(), up.contiguous(), weights.contiguous()
        out = torch.empty_like(gate)
        experts = weights.shape[1]
        block = min(_EXPERTS, experts)
        sizes = (experts, gate.shape[1] // experts, block)
        _gate_kernel[(gate.shape[0], experts // block)](gate, up, weights, out, limit, *sizes)
        ctx.save_for_backward(gate, up, weights)
        ctx.limit, ctx.sizes = limit, sizes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        outs = [torch.empty_like(x) for x in inputs]
        grid = (inputs[0].shape[0], ctx.sizes[0] // ctx.sizes[2])
        _gate_back_kernel[grid](*inputs, grads[0].contiguous(), *outs, ctx.limit, *ctx.sizes)
        return (*outs, None)


def mix_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out: Tensor = _MixStreams.apply(streams, y, post, comb)
    return out


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    out: Tensor = _CollapseStreams.apply(streams, pre)
    return out


def gated_experts(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    out: Tensor = _GatedExperts.apply(gate, up, weights, limit)
    return out
