"""Two autotuned kernels, one under heuristics, for test_triton_pins.py; their timer says the last is best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

TIMED: list[str] = []
"""A word for each configuration that was timed, in order; the tests clear it."""


def time_backwards(kernel_call: Callable[[], None], quantiles: Any = None) -> list[float]:
    """Run the kernel and say that it took less time than any before it."""
    kernel_call()
    TIMED.append("timed")
    return [1.0 / len(TIMED)] * 3


CONFIGS = [
    triton.Config({"block": block}, num_warps=warps, num_stages=2) for block in (16, 32) for warps in (1, 4)
]


@triton.autotune(configs=CONFIGS, key=["count"], do_bench=time_backwards)
@triton.jit
def square_kernel(x, y, count, block: tl.constexpr):
    """Write the square of x to y."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    value = tl.load(x + places, mask=inside)
    tl.store(y + places, value * value, mask=inside)


@triton.heuristics({"is_even": lambda arguments: arguments["count"] % 2 == 0})
@triton.autotune(configs=CONFIGS, key=["count"], do_bench=time_backwards)
@triton.jit
def double_kernel(x, y, count, block: tl.constexpr, is_even: tl.constexpr):
    """Write twice x to y, three times where count is odd."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    factor = 2 if is_even else 3
    tl.store(y + places, tl.load(x + places, mask=inside) * factor, mask=inside)


def run_square(count: int) -> torch.Tensor:
    """Run square_kernel on 0, 1, 2, ..."""
    x, y = torch.arange(count, dtype=torch.float32), torch.zeros(count)
    square_kernel[lambda meta: (triton.cdiv(count, meta["block"]),)](x, y, count)
    return y


def run_double(count: int) -> torch.Tensor:
    """Run double_kernel on 0, 1, 2, ..."""
    x, y = torch.arange(count, dtype=torch.float32), torch.zeros(count)
    double_kernel[lambda meta: (triton.cdiv(count, meta["block"]),)](x, y, count)
    return y
