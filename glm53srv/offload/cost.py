"""What a miss costs on either lane, and the table that turns costs into a decision.

A layer's routed experts run on two lanes at once: the GPU computes the experts in VRAM and reads some misses
over the link, the CPU computes the other misses.

    cpu_ms(n)       = 0 for n = 0, else cpu_fixed_ms + n * cpu_expert_ms
    gpu_ms(h, m)    = gpu_fixed_ms + h * vram_expert_ms + m * zero_copy_ms
    layer           = max(cpu_ms(n), gpu_ms(h, misses - n))

Where the experts in VRAM are computed while others travel, and these behind their way (is_overlapped), only
the longer of the two counts:

    gpu_ms(h, m)    = gpu_fixed_ms + max(h * vram_expert_ms, m * zero_copy_ms)

Whole experts seldom divide evenly, so one of them may be shared: then n has a fraction. The link carries the
rest of that expert only, but the GPU computes it whole, with zeros for the CPU's neurons; so the CPU's part
counts among the hits, too, unless these are overlapped: it is computed behind its rest's way then.

Costs change slowly and by measurement; the decision is needed in every layer of every step, on the device.
So the host solves the small problem for every (hits, misses) and hands over an integer table: the kernel
needs no floating point, and equals the pure rule bit for bit whatever the costs are.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["fast", "exact"]

CPU_FIXED_MS = 0.11
"""Hand-over, wake-up and reduction of one CPU job (0xSero/glm53-flash-offload, EPYC 7443P, its cost model).
"""
CPU_EXPERT_MS_22_THREADS = 0.104
"""One expert on 22 threads of the same machine; scaled by the thread count until measured here."""
ZERO_COPY_MS = 0.40
"""One expert read over PCIe 4.0 x16 by the GPU, 23.6 GB/s (same source)."""
VRAM_EXPERT_MS = 0.034
"""One expert computed from VRAM on an RTX 3090 (same source: 4.2 ms per token at 36 % hits)."""


MIN_PART = 1 / 8
"""Least part of an expert on either lane when they share it. The fixed work of sharing is not in the model:
masked scales, the input's transform for the CPU. An eighth is 0.024 ms of a link with 0.19 ms an expert."""
MIN_GAIN_MS = 0.005
"""What sharing must gain over whole experts: less is beneath what costs are known to."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How experts may be shared. num_parts: equal parts of an expert, 1 for whole experts only.

    num_landing: experts of a layer that can be copied over the link; what is read in place cannot be shared.
    """

    num_parts: int = 1
    num_landing: int = 0

    def allows(self, share: int, num_link: int) -> bool:
        """Tell whether the CPU may have `share` parts of one of num_link experts of the link."""
        least = math.ceil(MIN_PART * self.num_parts)
        return share == 0 or (least <= share <= self.num_parts - least and num_link <= self.num_landing)


WHOLE = Parts()


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds of one layer's routed experts; see the head of the file.

    is_overlapped: which of its two rules holds for the GPU's lane.
    """

    cpu_fixed_ms: float
    cpu_expert_ms: float
    zero_copy_ms: float
    vram_expert_ms: float
    gpu_fixed_ms: float = 0.0
    is_overlapped: bool = False

    def __post_init__(self) -> None:
        """Check that every cost is a time. Raises ValueError."""
        hidden = (self.cpu_fixed_ms, self.gpu_fixed_ms, self.vram_expert_ms)
        values = (*hidden, self.cpu_expert_ms, self.zero_copy_ms)
        if not all(np.isfinite(value) and value >= 0 for value in values) or min(values[3:]) <= 0:
            raise ValueError(f"costs must be positive milliseconds: {self}")

    def cpu_ms(self, num_experts: float) -> float:
        """Time of a CPU job over num_experts experts; a fraction is a part of one."""
        return self.cpu_fixed_ms + num_experts * self.cpu_expert_ms if num_experts else 0.0

    def gpu_ms(self, num_hits: float, num_link: float) -> float:
        """Time of the GPU lane: its launches, experts in VRAM, experts over the link."""
        vram_ms, link_ms = num_hits * self.vram_expert_ms, num_link * self.zero_copy_ms
        return self.gpu_fixed_ms + (max(vram_ms, link_ms) if self.is_overlapped else vram_ms + link_ms)

    def layer_ms(self, num_hits: int, num_link: float, num_cpu: float) -> float:
        """Time of a layer's routed experts: the slower lane. num_cpu % 1: the CPU's part of a shared one."""
        shared = 0.0 if self.is_overlapped else num_cpu % 1
        return max(self.cpu_ms(num_cpu), self.gpu_ms(num_hits + shared, num_link))


COST_NAMES = ("cpu_fixed_ms", "cpu_expert_ms", "zero_copy_ms", "vram_expert_ms", "gpu_fixed_ms")
"""The fields of CostModel that are times."""


@dataclass(frozen=True, slots=True)
class CostOverrides:
    """Values that the user pins (GLM53_CT_A, GLM53_CT_B, GLM53_CT_TZC); None is measured and tracked."""

    cpu_fixed_ms: float | None = None
    cpu_expert_ms: float | None = None
    zero_copy_ms: float | None = None

    def sources(self) -> dict[str, Literal["set"]]:
        """Name the costs that are pinned."""
        return {name: "set" for name in CostOverrides.__slots__ if getattr(self, name) is not None}

    def apply(self, costs: CostModel) -> CostModel:
        """Return costs with the pinned values in place."""
        return replace(
            costs,
            cpu_fixed_ms=costs.cpu_fixed_ms if self.cpu_fixed_ms is None else self.cpu_fixed_ms,
            cpu_expert_ms=costs.cpu_expert_ms if self.cpu_expert_ms is None else self.cpu_expert_ms,
            zero_copy_ms=costs.zero_copy_ms if self.zero_copy_ms is None else self.zero_copy_ms,
        )


def default_costs(num_threads: int) -> CostModel:
    """Guess costs before anything is measured. Raises ValueError for num_threads < 1."""
    if num_threads < 1:
        raise ValueError("num_threads must be at least 1")
    return CostModel(CPU_FIXED_MS, CPU_EXPERT_MS_22_THREADS * 22 / num_threads, ZERO_COPY_MS, VRAM_EXPERT_MS)


def fit_lane_cost(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit (fixed ms, ms per expert) to calibration runs of one lane: (experts in the job, milliseconds).

    The slope is the median of the slopes between all pairs of different size, the intercept the median of
    what is left (Theil-Sen): a few runs that were interrupted do not move it. Raises ValueError when all
    jobs have one size, or the slope is not positive.
    """
    slopes = [
        (second_ms - first_ms) / (second - first)
        for (first, first_ms), (second, second_ms) in itertools.combinations(samples, 2)
        if first != second
    ]
    if not slopes or (slope := statistics.median(slopes)) <= 0:
        raise ValueError("calibration needs jobs of different sizes whose time grows with the size")
    return max(0.0, statistics.median(ms - size * slope for size, ms in samples)), slope


def cpu_count_table(costs: CostModel, max_picks: int, mode: Mode, parts: Parts = WHOLE) -> NDArray[np.int32]:
    """Return how many parts of misses go to the CPU: int32 (max_picks + 1, max_picks + 1), by [hits, misses].

    Each entry minimises CostModel.layer_ms; of equal ones the smallest count wins, since a pick computed by
    the GPU is exact. An expert is shared where Parts.allows it and whole ones take MIN_GAIN_MS longer.
    `exact` sends none. Entries with hits + misses > max_picks cannot occur and are 0.
    """
    table = np.zeros((max_picks + 1, max_picks + 1), np.int32)
    if mode == "exact":
        return table
    size = parts.num_parts
    for misses in range(1, max_picks + 1):
        counts = np.array(
            [n for n in range(misses * size + 1) if parts.allows(n % size, misses - n // size)], np.int32
        )
        layer_ms = _layer_ms(costs, np.arange(max_picks + 1 - misses)[:, None], misses, counts / size)
        whole_ms = np.where(counts % size, np.inf, layer_ms)
        pays = layer_ms.min(axis=1) < whole_ms.min(axis=1) - MIN_GAIN_MS
        best = np.where(pays, layer_ms.argmin(axis=1), whole_ms.argmin(axis=1))
        table[: max_picks + 1 - misses, misses] = counts[best]
    return table


def _layer_ms(
    costs: CostModel, hits: NDArray[np.int_], misses: int, on_cpu: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Give CostModel.layer_ms for hits (n, 1) and each number of experts on the CPU (m,): (n, m)."""
    link_ms = (misses - on_cpu) * costs.zero_copy_ms
    if costs.is_overlapped:
        gpu_ms = costs.gpu_fixed_ms + np.maximum(hits * costs.vram_expert_ms, link_ms)
    else:
        gpu_ms = costs.gpu_fixed_ms + (hits + on_cpu % 1) * costs.vram_expert_ms + link_ms
    cpu_ms = np.where(on_cpu, costs.cpu_fixed_ms + on_cpu * costs.cpu_expert_ms, 0.0)
    return np.asarray(np.maximum(gpu_ms, cpu_ms))
