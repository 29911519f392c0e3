"""The admission rule of the published engine that the replay is checked against, built from its description.

0xSero/glm53-flash-offload decides inside the step: of a layer's misses the cost rule sends some to the CPU,
and every other one is copied into a slot that CLOCK gives up, then computed from there. `exact` mode sends
none to the CPU, so it copies every miss. Its copies are therefore in the layer's critical path. Which
misses go to the CPU is not published; here the later picks of the router's order do (assumed).

With a guard the same in-step decision follows our rule instead: a miss that the GPU reads takes the coldest
of the offered slots, and only if it is hotter; else it is read in place. That answers whether deciding
inside the step would beat deciding between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency_params import ResidencyParams


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Distinct experts of a step per layer, int32 (layers,): in VRAM, over the link, on the CPU; and how many
    of those over the link were admitted.
    """

    num_hits: NDArray[np.int32]
    num_link: NDArray[np.int32]
    num_cpu: NDArray[np.int32]
    num_admitted: NDArray[np.int32]


class InStepClock:
    """One CLOCK over all layers with immediate admission. One thread."""

    def __init__(
        self,
        geometry: ExpertGeometry,
        num_slots: int,
        cpu_count: NDArray[np.int32],
        popularity: NDArray[np.float32],
        guard: ResidencyParams | None = None,
    ) -> None:
        """Fill the slots with the most popular; cpu_count as in split.split_picks.

        popularity: float32 (num_keys,), picks per token. guard: our rule (heat_keep, victim_window,
        min_heat_gain), or None for the published one.
        """
        popular_keys = np.argsort(-popularity, kind="stable").astype(np.int32)
        self._guard = guard
        self._heat = np.minimum(popularity, 1.0).astype(np.float32)
        self._geometry = geometry
        self._cpu_count = cpu_count
        self._slot_key = popular_keys[:num_slots].astype(np.int32)
        self._key_slot = np.full(geometry.num_keys, -1, np.int32)
        self._key_slot[self._slot_key] = np.arange(num_slots, dtype=np.int32)
        self._referenced = np.zeros(num_slots, bool)
        self._hand = 0

    def step(self, picks: NDArray[np.integer]) -> LayerCounts:
        """Serve one step: picks integer (layers, P)."""
        counts = np.zeros((4, len(picks)), np.int32)
        touched = []
        for layer, row in enumerate(picks):
            experts, first = np.unique(row, return_index=True)
            keys = experts[np.argsort(first)].astype(np.int32) + layer * self._geometry.num_experts
            slots = self._key_slot[keys]
            missed = keys[slots < 0]
            num_hits = len(keys) - len(missed)
            num_cpu = int(self._cpu_count[num_hits, len(missed)])
            self._referenced[slots[slots >= 0]] = True
            touched.append(keys)
            if self._guard is not None:
                missed = missed[np.argsort(-self._heat[missed], kind="stable")]
            num_admitted = self._admit(missed[: len(missed) - num_cpu], slots[slots >= 0])
            counts[:, layer] = num_hits, len(missed) - num_cpu, num_cpu, num_admitted
        if self._guard is not None:
            self._heat *= np.float32(self._guard.heat_keep)
            self._heat[np.concatenate(touched)] += np.float32(1.0 - self._guard.heat_keep)
        return LayerCounts(*counts)

    def _admit(self, keys: NDArray[np.int32], busy: NDArray[np.int32]) -> int:
        """Copy keys into the next unreferenced slots that the layer does not read; return how many."""
        if not len(keys):
            return 0
        ring = (self._hand + np.arange(len(self._slot_key))) % len(self._slot_key)
        usable = np.ones(len(ring), bool)
        usable[(busy - self._hand) % len(ring)] = False
        offered = np.flatnonzero(usable & ~self._referenced[ring])
        if len(offered) < len(keys):
            self._referenced[:] = False
            offered = np.flatnonzero(usable)
        end = int(offered[len(keys) - 1])
        victims = ring[offered[: len(keys)]]
        if self._guard is not None:
            near = ring[offered[: len(keys) * self._guard.victim_window]]
            victims = near[np.argsort(self._heat[self._slot_key[near]], kind="stable")[: len(keys)]]
        self._referenced[ring[: end + 1]] = False
        self._hand = int(ring[end] + 1) % len(ring)
        if self._guard is not None:
            gain = self._heat[keys] - self._heat[self._slot_key[victims]]
            keys, victims = keys[gain > self._guard.min_heat_gain], victims[gain > self._guard.min_heat_gain]
        self._key_slot[self._slot_key[victims]] = -1
        self._slot_key[victims] = keys
        self._key_slot[keys] = victims
        self._referenced[victims] = True
        return len(keys)
