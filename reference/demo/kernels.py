"""GPU forms of the training model's parts: KDA from flash-linear-attention, Sinkhorn in Triton."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import triton
import triton.language as tl
from fla.ops.kda import chunk_kda
from torch import Tensor

from reference.demo import fused, model
from reference.demo.model import Functions
from reference.demo.pinned import pin_kernels

_BLOCK = 64
MAX_ERROR = 1e-4
"""Relative; fp32 sums in another order differ by about 1e-7."""


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """Run fla's chunked kernels; the gate is given in log space, bounded below by -5."""
    # contiguous: the kernels read q, k, v as dense (1, tokens, heads, dim), and ours are slices of one buffer
    q, k, v = (x.to(torch.bfloat16).contiguous() for x in (q, k, v))
    out: Tensor = chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        use_qk_l2norm_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        cu_seqlens=starts.long(),
    )[0]
    return out


@triton.jit
def _half_step(c, row: tl.constexpr, eps):
    if row:
        return c / (tl.sum(c, 2)[:, :, None] + eps)
    return c / (tl.sum(c, 1)[:, None, :] + eps)


@triton.jit
def _half_step_back(c, dy, row: tl.constexpr, eps):
    if row:
        s = tl.sum(c, 2)[:, :, None] + eps
        return dy / s - tl.sum(dy * c / (s * s), 2)[:, :, None]
    s = tl.sum(c, 1)[:, None, :] + eps
    return dy / s - tl.sum(dy * c / (s * s), 1)[:, None, :]


@triton.jit
def _load(ptr, total, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    offset = t * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    return tl.load(ptr + offset, mask=t < total, other=0.0)


@triton.jit
def _store(ptr, value, total, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    offset = t * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    tl.store(ptr + offset, value, mask=t < total)


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, 2)[:, :, None])
    return e / tl.sum(e, 2)[:, :, None]


@triton.jit
def _forward_kernel(x_ptr, y_ptr, total, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    c = _softmax(_load(x_ptr, total, BLOCK)) + eps
    c = _half_step(c, False, eps)
    for _ in range(ITERS - 1):
        c = _half_step(c, True, eps)
        c = _half_step(c, False, eps)
    _store(y_ptr, c, total, BLOCK)


@triton.jit
def _backward_kernel(x_ptr, dy_ptr, dx_ptr, total, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    # every step's input is recomputed from the start: 16 numbers a token, far cheaper than keeping 39 states
    p = _softmax(_load(x_ptr, total, BLOCK))
    d = _load(dy_ptr, total, BLOCK)
    for back in range(ITERS - 1):
        c = _half_step(p + eps, False, eps)
        for _ in range(ITERS - 2 - back):
            c = _half_step(c, True, eps)
            c = _half_step(c, False, eps)
        middle = _half_step(c, True, eps)
        d = _half_step_back(middle, d, False, eps)
        d = _half_step_back(c, d, True, eps)
    d = _half_step_back(p + eps, d, False, eps)
    _store(dx_ptr, p * (d - tl.sum(p * d, 2)[:, :, None]), total, BLOCK)


class Sinkhorn(torch.autograd.Function):
    """Doubly stochastic 4x4 matrices; logits fp32 (tokens, 4, 4), contiguous."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        y = torch.empty_like(logits)
        total = logits.shape[0]
        _forward_kernel[(triton.cdiv(total, _BLOCK),)](logits, y, total, eps, iters, _BLOCK)
        ctx.save_for_backward(logits)
        ctx.iters, ctx.eps = iters, eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        dx = torch.empty_like(logits)
        total = logits.shape[0]
        grad = grads[0].contiguous()
        _backward_kernel[(triton.cdiv(total, _BLOCK),)](logits, grad, dx, total, ctx.eps, ctx.iters, _BLOCK)
        return dx, None, None


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    out: Tensor = Sinkhorn.apply(logits, iters, eps)
    return out


def fused_functions() -> dict[str, Any]:
    """Give the fused form of each field of Functions that has one."""
    return {
        "sinkhorn": sinkhorn,
        "mix_streams": fused.mix_streams,
        "collapse_streams": fused.collapse_streams,
        "gated_experts": fused.gated_experts,
    }


def check_functions(device: str) -> dict[str, float]:
    """Compare each fused part with its definition, values and gradients; give the relative errors.

    A part that does not even compile on this device counts as infinitely wrong.
    """
    torch.manual_seed(0)
    streams, y = torch.randn(500, 4, 256, device=device), torch.randn(500, 256, device=device)
    post, comb = torch.rand(500, 4, device=device), torch.rand(500, 4, 4, device=device)
    gate, up = torch.randn(500, 512, device=device) * 4, torch.randn(500, 512, device=device) * 4
    weights = torch.rand(500, 4, device=device)
    inputs: dict[str, tuple[Tensor, ...]] = {
        "sinkhorn": (comb * 4,),
        "mix_streams": (streams, y, post, comb),
        "collapse_streams": (streams, post),
        "gated_experts": (gate, up, weights),
    }
    settings: dict[str, tuple[float, ...]] = {"sinkhorn": (20, 1e-6), "gated_experts": (10.0,)}
    errors = {}
    for name, ours in fused_functions().items():
        try:
            errors[name] = _error(ours, getattr(model, name), inputs[name], settings.get(name, ()))
        except Exception as error:  # whatever a compiler raises: the run goes on without this part
            print(f"{name} does not run here: {error}", flush=True)
            errors[name] = math.inf
    return errors


def gpu_functions(device: str, *, with_fused: bool = True, tune: bool = False) -> Functions:
    """Give the set for a GPU run; a fused part that fails its check is left out, and said so.

    tune: let fla time its kernels' configurations (minutes); else each gets one at once.
    """
    functions = Functions(kda=chunked_kda)
    if not tune:
        print(json.dumps({"pinned kernels": len(pin_kernels())}), flush=True)
    if not with_fused:
        return functions
    errors = check_functions(device)
    for name, ours in fused_functions().items():
        if errors[name] < MAX_ERROR:
            setattr(functions, name, ours)
    print(json.dumps({"errors of the fused parts (left out above 1e-4)": errors}), flush=True)
    return functions


def _error(ours: Any, theirs: Any, inputs: tuple[Tensor, ...], settings: tuple[float, ...]) -> float:
    """Give the largest relative error over the value and every gradient."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, *settings)
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(out.shape, generator=generator).to(out.device)
        results.append([out, *torch.autograd.grad(out, leaves, direction.to(out.dtype))])
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in zip(*results, strict=True))
