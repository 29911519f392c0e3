"""Which experts of a short prompt's layer the CPU computes: those that are not resident and have few rows.

A short chunk is bound by the link: each of its experts that is not in VRAM is read once, whatever its rows.
The CPU reads the same bytes from its own memory and pays for each row. So it takes the experts with the
fewest rows, as long as that makes the slower of the two lanes faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.cost import CostModel

ROW_SHARE = 0.18
"""What a further row of an expert costs on the CPU, in parts of the first (fast16 with AVX-512: 1.77 ms for
one row and 2.73 for four, bench/results/2026-11-29-cpu.md)."""
JOB_MS = 0.5
"""Fixed time of a layer's job that is counted for picks, input and sums on their way. An estimate."""

PACE_JOBS = 20
"""Errands after which one counts 1/e: half a prompt of 42 layers."""
MOST_PACE = 8.0


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """A layer's picks, divided. on_cpu: bool (rows, top_k). expected_ms: what the CPU's part should take it.

    cpu_picks: int32 (rows, top_k), -1 for what stays on the GPU. gpu_picks: int64 (rows, top_k), where a
    stand-in, with a weight of 0, takes the place of what the CPU computes.
    """

    on_cpu: NDArray[np.bool_]
    expected_ms: float
    cpu_picks: NDArray[np.int32]
    gpu_picks: NDArray[np.int64]


def rows_ms(num_rows: NDArray[np.integer], costs: CostModel) -> NDArray[np.float64]:
    """Give what experts of so many rows each, at least one, take the CPU: ms, of the same shape."""
    return np.asarray(costs.cpu_expert_ms * (1 + ROW_SHARE * (num_rows - 1)), np.float64)


class Pace:
    """How much longer errands take than costs say, followed from each. Engine thread only.

    Costs are those of decode steps: few rows, beside copies over the link. value: 1 if as long.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, expected_ms: float, elapsed_ms: float) -> None:
        """Take an errand: what it should have taken at pace 1, and what it took."""
        found = min(max(elapsed_ms / expected_ms, 1 / MOST_PACE), MOST_PACE)
        self.value += (found - self.value) / PACE_JOBS

    def apply(self, costs: CostModel) -> CostModel:
        """Give costs at this pace."""
        return replace(costs, cpu_expert_ms=costs.cpu_expert_ms * self.value)


def choose_for_cpu(
    num_rows: NDArray[np.integer], is_resident: NDArray[np.bool_], costs: CostModel
) -> NDArray[np.bool_]:
    """Choose experts of a layer: bool (experts,). num_rows: rows that picked each expert."""
    candidates = np.flatnonzero((num_rows > 0) & ~is_resident)
    order = candidates[np.argsort(num_rows[candidates], kind="stable")]
    cpu_ms = JOB_MS + np.cumsum(rows_ms(num_rows[order], costs))
    link_ms = costs.zero_copy_ms * np.arange(len(order) - 1, -1, -1)
    slower = np.concatenate([[costs.zero_copy_ms * len(order)], np.maximum(cpu_ms, link_ms)])
    chosen = np.zeros(len(num_rows), bool)
    chosen[order[: int(np.argmin(slower))]] = True
    return chosen


def split_prefill(
    picks: NDArray[np.int64], is_resident: NDArray[np.bool_], costs: CostModel
) -> PrefillSplit | None:
    """Divide a layer's picks, int64 (rows, top_k), or None if the CPU had better take nothing.

    is_resident: bool (experts,). A stand-in is another pick of the row that stays on the GPU, so that the
    GPU reads no expert for it, one in VRAM if there is one: an expert of many rows may be read several
    times. A row without any gets the layer's most picked expert of those that stay, again of VRAM's first.
    """
    num_rows = np.bincount(picks.reshape(-1), minlength=len(is_resident))
    chosen = choose_for_cpu(num_rows, is_resident, costs)
    on_cpu = chosen[picks]
    kept = np.where(chosen, 0, num_rows)
    if not on_cpu.any() or not kept.any():
        return None
    worth = np.where(chosen, -1, np.where(is_resident, 1, 0))
    place = np.argmax(worth[picks], axis=1)  # the first of the best that stay, 0 where none does
    common = int(np.argmax(np.where(kept > 0, kept + len(picks) * picks.shape[1] * worth, -1)))
    stand_in = np.where(on_cpu.all(axis=1), common, picks[np.arange(len(picks)), place])
    return PrefillSplit(
        on_cpu,
        float(rows_ms(num_rows[chosen], costs).sum()),
        np.where(on_cpu, picks, -1).astype(np.int32),
        np.where(on_cpu, stand_in[:, None], picks),
    )
