"""The costs of a running device and the table made of them, which is remade when they have moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.calibrate import Calibration, gb_per_s
from glm53srv.offload.copy_budget import CopyBudget, CopyBudgetParams
from glm53srv.offload.cost import COST_NAMES, WHOLE, CostModel, CostOverrides, Mode, Parts, cpu_count_table
from glm53srv.offload.cost_tracker import CostTracker
from glm53srv.offload.report import CostReport

REFRESH_STEPS = 64
"""Decode steps between two looks at the costs: some seconds. A table takes some ms of host time."""
MIN_DRIFT = 0.05
"""Change of a cost that is worth a new table: its entries are whole experts, or eighths at the finest."""
EARLY_REFRESH_STEPS = 8
LARGE_DRIFT = 0.25
"""Change of a cost that is looked for every EARLY_REFRESH_STEPS, as when the start was measured badly."""
PROBE_STEPS = 4
"""Steps that give workers who had no job for long an expert or two of some layers, to see what they take now.
Two sizes tell a job's fixed part from its experts'. Without probes a machine that was busy while it was
measured at start, or for a while later, would never be asked again: fast mode would go on without its CPU
(seen on an H200 machine, 30 November 2026)."""
FIRST_PROBE = 64
MAX_PROBE = 4096
"""Steps without a job before the first probe; twice as many after each that brings no more jobs."""


class CostLedger:
    """Owns tracker, table and copy budget. Called by the engine thread, between steps.

    table: int32 (max_picks + 1, max_picks + 1), see cost.cpu_count_table; a new array when it changes.
    """

    def __init__(
        self,
        calibration: Calibration,
        overrides: CostOverrides,
        max_picks: int,
        mode: Mode,
        parts: Parts = WHOLE,
    ) -> None:
        self.calibration = calibration
        self._tracker = CostTracker(calibration.costs, overrides)
        self._max_picks = max_picks
        self._mode: Mode = mode
        self._parts = parts
        self._tabled = self._tracker.costs
        self._num_steps = 0
        is_pinned = None not in (overrides.cpu_fixed_ms, overrides.cpu_expert_ms)
        self._may_probe = mode != "exact" and not is_pinned
        self._num_jobless = 0  # steps in a row
        self._probe_after = FIRST_PROBE
        self._probe_ends: int | None = None  # the step at whose end a running probe is over
        self._own_jobs_from = 0  # the first step behind a probe whose jobs the table has asked for
        self._cpu_jobs: list[tuple[float, float]] = []  # of the step that runs: experts, ms
        self._gpu_layers: list[tuple[float, float, float]] = []  # hits, experts over the link, ms
        self.table: NDArray[np.int32] = cpu_count_table(self._tabled, max_picks, mode, parts)
        self.num_tables = 1
        default = CopyBudgetParams()
        self._budget = CopyBudget(CopyBudgetParams(copy_ms=calibration.copy_ms or default.copy_ms))

    @property
    def costs(self) -> CostModel:
        """Costs as they are now known."""
        return self._tracker.costs

    @property
    def copy_ms(self) -> float:
        """One expert by the copy engine, as the budget counts it."""
        return self._budget.params.copy_ms

    def observe_cpu(self, jobs: Sequence[tuple[float, float]]) -> None:
        """Note CPU jobs of this step: experts, and ms from post to answer."""
        self._cpu_jobs += jobs

    def observe_gpu(self, layers: Sequence[tuple[float, float, float]]) -> None:
        """Note layers of this step: experts in VRAM, over the link, and ms of the GPU's lane."""
        self._gpu_layers += layers

    def end_step(self) -> None:
        """Learn from a decode step; every REFRESH_STEPS of them, make a new table if a cost has moved."""
        if self._cpu_jobs:
            self._tracker.observe_cpu(*np.array(self._cpu_jobs).T)
        if self._gpu_layers:
            self._tracker.observe_gpu(*np.array(self._gpu_layers).T)
        self._num_jobless = 0 if self._cpu_jobs else self._num_jobless + 1
        if self._cpu_jobs and self._num_steps >= self._own_jobs_from:
            self._probe_after = FIRST_PROBE
        self._cpu_jobs, self._gpu_layers = [], []
        self._num_steps += 1
        if self._probe_ends is not None:
            if self._num_steps >= self._probe_ends:
                self._end_probe()
        elif self._may_probe and self._num_jobless >= self._probe_after:
            self._begin_probe()
        elif self._num_steps % EARLY_REFRESH_STEPS == 0:
            is_whole_turn = self._num_steps % REFRESH_STEPS == 0
            if self._has_drifted(MIN_DRIFT if is_whole_turn else LARGE_DRIFT):
                self._renew()

    def share(self, parts: Parts) -> None:
        """Make a table that shares experts otherwise."""
        self._parts = parts
        self._renew()

    def grant(self, step_ms: float) -> int:
        """Give the admissions that the time of a step pays for; see copy_budget.py."""
        return self._budget.grant(step_ms)

    def spend(self, num_admissions: int) -> None:
        """Take off the admissions that were decided."""
        self._budget.spend(num_admissions)

    def report(self, expert_bytes: int) -> CostReport:
        """Tell what /stats shows."""
        now, found = self.costs, self.calibration
        return CostReport(
            now=now,
            at_start=found.costs,
            sources=found.sources,
            copy_ms=self.copy_ms,
            link_gb_s=gb_per_s(expert_bytes, now.zero_copy_ms),
            cpu_gb_s=gb_per_s(expert_bytes, now.cpu_expert_ms),
            copy_gb_s=gb_per_s(expert_bytes, found.copy_ms),
            num_samples=found.num_samples,
            elapsed_s=found.elapsed_s,
            num_tables=self.num_tables,
            notes=found.notes,
        )

    def _renew(self) -> None:
        self._tabled = self.costs
        self.table = cpu_count_table(self._tabled, self._max_picks, self._mode, self._parts)
        self.num_tables += 1

    def _begin_probe(self) -> None:
        """Give the workers something to do in some layers, and doubt what they took.

        One expert where a layer's misses leave 1 by four, two where they leave 4 by eight: three layers of
        eight, since workers who are slow would make every layer of a step wait.
        """
        self._tracker.doubt_cpu()
        self._probe_ends = self._num_steps + PROBE_STEPS
        self._own_jobs_from = self._probe_ends + 2  # a device's answers come a step late
        self._probe_after = min(2 * self._probe_after, MAX_PROBE)
        hits = np.arange(self._max_picks + 1)[:, None]
        misses = np.arange(self._max_picks + 1)[None, :]
        asked = np.where(misses % 4 == 1, 1, np.where(misses % 8 == 4, 2, 0))
        asked = np.where(hits + misses <= self._max_picks, asked * self._parts.num_parts, 0)
        self.table = np.maximum(self.table, asked).astype(np.int32)
        self.num_tables += 1

    def _end_probe(self) -> None:
        self._probe_ends = None
        self._renew()

    def _has_drifted(self, least_share: float) -> bool:
        now, then = self.costs, self._tabled
        pairs = [(getattr(now, name), getattr(then, name)) for name in COST_NAMES]
        # Of an expert's time too: a fixed part near 0 may change by a multiple without moving an entry.
        least = 0.25 * then.zero_copy_ms
        return any(abs(new - old) > least_share * max(old, least) for new, old in pairs)
