"""Costs followed while a server runs: each lane's jobs say what its fixed part and its experts take.

A lane's time is a weighted sum of what a job has: one, its experts, of the GPU's also its hits. The weights
are fitted to the last thousands of jobs by least squares, older ones fading. So a lane that is slowed down
only while the other one runs (both read the same memory) is seen as it is in a step, not as it was when it
was timed alone at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.cost import CostModel, CostOverrides

Floats = NDArray[np.float64]

MEMORY_JOBS = 2000
"""Jobs after which one counts 1/e: some 50 decode steps of 42 layers."""
PRIOR_JOBS = 2.0
"""What the start values weigh beside those, for ever: what the jobs do not tell apart stays near them."""
MAX_DEVIATIONS = 3.0
"""A job further off than this many usual deviations counts as one that is that far off:
a stall of a hundred times the usual is one slow job, while a lasting change gets through, since the usual
deviation grows with it.
"""
MIN_SHARE = 0.01
"""Of its start value, below which no cost falls."""
DOUBTED_JOBS = 20.0
"""What all earlier jobs weigh together for a lane that had none for long: half of one step's."""
DOUBTED_PRIOR = 0.1
"""Of PRIOR_JOBS, what the start values weigh from then on."""


class FittedCosts:
    """Non-negative costs c with time = features @ c, followed online. Owned by the engine thread."""

    def __init__(
        self, start: Sequence[float], moves: Sequence[bool], probes: Sequence[Sequence[float]]
    ) -> None:
        """start: costs in ms. moves: which of them are followed; the others stay as they are. probes: jobs,
        rows of features, on which the start values are taken to hold."""
        self._start = np.asarray(start, np.float64)
        self._moves = np.asarray(moves, bool)
        self.values = self._start.copy()
        rows = np.asarray(probes, np.float64)
        own = rows[:, self._moves]
        weight = PRIOR_JOBS / len(rows)
        self._prior = weight * own.T @ own
        self._prior_times = weight * own.T @ (own @ self._start[self._moves])
        self._is_doubted = False
        self._weight = 0.0  # jobs behind the sums below
        self._squares = np.zeros_like(self._prior)
        self._times = np.zeros_like(self._prior_times)
        self._deviation_ms = 0.1 * float((rows @ self._start).mean())

    def observe(self, features: Floats, elapsed_ms: Floats) -> None:
        """Take jobs: features (jobs, costs), elapsed_ms (jobs,). What is no positive time is left out."""
        usable = np.isfinite(elapsed_ms) & (elapsed_ms > 0)
        features, elapsed_ms = features[usable], elapsed_ms[usable]
        if not self._moves.any() or not len(elapsed_ms):
            return
        expected = features @ self.values
        error = elapsed_ms - expected
        bound = MAX_DEVIATIONS * self._deviation_ms
        bounded = np.clip(error, -bound, bound)
        own = features[:, self._moves]
        target = expected + bounded - features[:, ~self._moves] @ self.values[~self._moves]
        fade = (1 - 1 / MEMORY_JOBS) ** len(own)
        self._weight = fade * self._weight + len(own)
        self._squares = fade * self._squares + own.T @ own
        self._times = fade * self._times + own.T @ target
        found = np.linalg.solve(self._prior + self._squares, self._prior_times + self._times)
        self.values[self._moves] = np.maximum(found, MIN_SHARE * self._start[self._moves])
        share = min(1.0, len(own) / MEMORY_JOBS)
        usual = float(np.minimum(np.abs(error), bound).mean())
        # Grows at once where it is far too small: bounded errors could not move anything otherwise.
        self._deviation_ms += max(share, 0.02) * (1.5 * usual - self._deviation_ms)
        self._deviation_ms = max(self._deviation_ms, 0.01 * float(np.abs(expected).mean()))

    def doubt(self) -> None:
        """Let the next jobs say more than all before them, and than the start. Moves no cost by itself."""
        share = min(1.0, DOUBTED_JOBS / max(self._weight, 1.0))
        self._weight *= share
        self._squares *= share
        self._times *= share
        # Bounded errors reach down to a job that takes next to nothing.
        self._deviation_ms = max(self._deviation_ms, float(self.values.sum()) / 2)
        if not self._is_doubted:
            self._is_doubted = True
            self._prior *= DOUBTED_PRIOR
            self._prior_times *= DOUBTED_PRIOR


class CostTracker:
    """The cost model in force: measured at start, corrected online, pinned where the user says so.

    Owned by the engine thread, fed between steps with the times that the lanes report. A cost of 0 for hits
    says that a device hides it (see docs/offload.md, rule 4), and stays.
    """

    def __init__(self, initial: CostModel, overrides: CostOverrides | None = None) -> None:
        given = overrides or CostOverrides()
        self._base = base = given.apply(initial)
        sizes = (1, 2, 4, 8)
        self._cpu = FittedCosts(
            (base.cpu_fixed_ms, base.cpu_expert_ms),
            (given.cpu_fixed_ms is None, given.cpu_expert_ms is None),
            [(1, size) for size in sizes],
        )
        follows_gpu = given.zero_copy_ms is None  # pinned, the whole lane stays: then runs repeat
        probes = [(1, hits, link) for hits in (0, 4, 8) for link in sizes] + [(1, hits, 0) for hits in sizes]
        start = (base.gpu_fixed_ms, base.vram_expert_ms, base.zero_copy_ms)
        self._gpu = FittedCosts(
            start,
            (follows_gpu, follows_gpu and base.vram_expert_ms > 0, follows_gpu),
            self._gpu_features(np.array(probes, np.float64), np.array(start)).tolist(),
        )

    @property
    def costs(self) -> CostModel:
        """Current costs."""
        cpu_fixed, cpu_expert = self._cpu.values.tolist()
        gpu_fixed, vram_expert, zero_copy = self._gpu.values.tolist()
        return replace(
            self._base,
            cpu_fixed_ms=cpu_fixed,
            cpu_expert_ms=cpu_expert,
            gpu_fixed_ms=gpu_fixed,
            vram_expert_ms=vram_expert,
            zero_copy_ms=zero_copy,
        )

    def observe_cpu(self, num_experts: Floats, elapsed_ms: Floats) -> None:
        """Learn from CPU jobs, post to answer; both (jobs,). Jobs without experts are left out."""
        busy = num_experts > 0
        sizes = num_experts[busy].astype(np.float64)
        self._cpu.observe(np.stack([np.ones_like(sizes), sizes], axis=1), elapsed_ms[busy])

    def doubt_cpu(self) -> None:
        """The workers had nothing to do for long: their next jobs say more than those before."""
        self._cpu.doubt()

    def observe_gpu(self, num_hits: Floats, num_link: Floats, elapsed_ms: Floats) -> None:
        """Learn from layers' GPU lanes, from the plan to the last expert's end; all (layers,)."""
        hits, link = num_hits.astype(np.float64), num_link.astype(np.float64)
        features = np.stack([np.ones_like(hits), hits, link], axis=1)
        self._gpu.observe(self._gpu_features(features, self._gpu.values), elapsed_ms)

    def _gpu_features(self, features: Floats, values: Floats) -> Floats:
        """Give what a layer's time is linear in: of hits and link that overlap, what takes longer by values.

        features: (layers, 3), one, hits, link. values: ms of each.
        """
        if not self._base.is_overlapped:
            return features
        is_link = features[:, 2] * values[2] >= features[:, 1] * values[1]
        return np.asarray(features * np.stack([np.ones_like(is_link), ~is_link, is_link], axis=1))
