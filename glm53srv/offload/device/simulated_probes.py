"""How the lanes of the simulated GPU are timed: its CPU workers for real, host memory in VRAM's place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from glm53srv.kernels import ExpertTable
from glm53srv.model.ops import F32
from glm53srv.offload.calibrate import CostProbes
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew
from glm53srv.offload.device.mailbox import Mailbox
from glm53srv.offload.device.slots import SlotStore

Compute = Callable[[int, ExpertTable, NDArray[np.int32], F32, NDArray[np.int32], F32], F32]
"""Experts of a layer: (layer, table, slots (experts,), x (rows, hidden), picks and weights (rows, n))."""

MAX_TABLES = 8


class SimulatedProbes:
    """Times one lane at a time, each job on other experts than the last. Engine thread, before any step.

    The slots must be free: what they hold is overwritten, and what is computed from them has no meaning.
    hand_over_ms: median of what a CPU job took beyond its computation, once some have run.
    """

    def __init__(
        self,
        arena: ExpertArena,
        store: SlotStore,
        crew: Crew,
        mailbox: Mailbox,
        compute: Compute,
        clock: Callable[[], float],
    ) -> None:
        self._arena = arena
        self._store = store
        self._crew = crew
        self._mailbox = mailbox
        self._compute = compute
        self._clock = clock
        num_layers = min(arena.geometry.num_layers, MAX_TABLES)
        self._tables = [arena.table(layer) for layer in range(num_layers)]
        self._next = 0
        self._x = np.random.default_rng(0).normal(size=(1, mailbox.shape.hidden)).astype(np.float32)
        self._hand_overs_ms: list[float] = []

    @property
    def hand_over_ms(self) -> float:
        return float(np.median(self._hand_overs_ms)) if self._hand_overs_ms else 0.0

    def probes(self) -> CostProbes:
        """Give the timers."""
        return CostProbes(cpu=self._cpu, link=self._link, vram=self._vram, copy=self._copy)

    def _cpu(self, num_experts: int) -> float:
        layer, picks = self._take(num_experts)
        weights = np.full(picks.shape, 1.0 / num_experts, np.float32)
        begin_s = self._clock()
        seq = self._crew.post(layer, self._x, picks, weights)
        self._crew.wait(seq, 1)
        elapsed_ms = (self._clock() - begin_s) * 1e3
        self._hand_overs_ms.append(max(0.0, elapsed_ms - self._mailbox.answer(seq).elapsed_ms))
        return elapsed_ms

    def _link(self, num_experts: int) -> float:
        layer, picks = self._take(num_experts)
        return self._time(layer, picks, np.full(self._arena.geometry.num_experts, -1, np.int32))

    def _vram(self, num_experts: int) -> float:
        layer, picks = self._take(num_experts)
        slots = np.full(self._arena.geometry.num_experts, -1, np.int32)
        slots[picks[0]] = (self._next + np.arange(num_experts)) % self._store.num_slots
        return self._time(layer, picks, slots)

    def _copy(self, num_experts: int) -> float:
        layer, picks = self._take(num_experts)
        keys = (layer * self._arena.geometry.num_experts + picks[0]).astype(np.int32)
        slots = ((self._next + np.arange(num_experts)) % self._store.num_slots).astype(np.int32)
        begin_s = self._clock()
        self._store.wait(self._store.stage(keys, slots))
        return (self._clock() - begin_s) * 1e3

    def _time(self, layer: int, picks: NDArray[np.int32], slots: NDArray[np.int32]) -> float:
        weights = np.full(picks.shape, 1.0 / picks.size, np.float32)
        begin_s = self._clock()
        self._compute(layer, self._tables[layer], slots, self._x, picks, weights)
        return (self._clock() - begin_s) * 1e3

    def _take(self, num_experts: int) -> tuple[int, NDArray[np.int32]]:
        """Give a layer and num_experts of its experts, (1, num_experts), not those of the last calls."""
        per_layer = self._arena.geometry.num_experts
        layer = self._next // per_layer % len(self._tables)
        picks = (self._next + np.arange(num_experts)) % per_layer
        self._next += num_experts
        return layer, picks.astype(np.int32)[None]
