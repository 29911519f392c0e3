"""One prefill chunk whose layers are staged: the schedule's copies, and where a layer finds its experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.device.slot_memory import SlotMemory
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.staging import StageCopy, StagingSchedule, stage_layer
from glm53srv.offload.vram_plan import VramPlan


class StagedChunk:
    """Buffers A and B in the lent slots, from the first lent one on. Owned by the engine thread.

    Per layer: `begin_layer`, compute, `end_layer`. Decode steps may run between two layers.
    """

    def __init__(self, policy: ResidencyPolicy, store: SlotMemory, plan: VramPlan) -> None:
        """Issue the copies of the first layers. Raises ValueError while the slots are not lent."""
        if not policy.is_lent or policy.num_slots - policy.capacity < 2 * plan.stage_slots:
            raise ValueError("the slots for staging are not lent yet")
        self._policy = policy
        self._store = store
        self._plan = plan
        self._first_slot = policy.capacity
        self._tickets: dict[int, int] = {}
        self._staged: dict[int, NDArray[np.int32]] = {}
        self.num_staged = 0
        self._schedule = StagingSchedule(policy.geometry.num_layers)
        store.scribble(np.arange(policy.capacity, policy.num_slots))
        self._issue(self._schedule.start())

    def begin_layer(self, layer: int) -> NDArray[np.int32]:
        """Wait for the layer's copies; gives each expert's slot, int32 (experts,), -1 for at home.

        Looked up now and not when the copies were issued: decode steps may have moved experts meanwhile.
        """
        self._store.wait(self._tickets.pop(layer))
        self._schedule.landed(layer)
        self._schedule.begin_layer(layer)
        staged = self._staged.pop(layer)
        slots: NDArray[np.int32] = np.where(staged >= 0, staged, self._store.table[layer])
        return slots

    def end_layer(self, layer: int) -> None:
        """Free the layer's buffer and issue the copies of the layer after next."""
        self._issue(self._schedule.end_layer(layer))

    def abort(self) -> None:
        """Give the chunk up, or end it; waits for copies under way, so that the slots can be given back."""
        for layer in self._schedule.abort():
            self._store.wait(self._tickets.pop(layer))

    def _issue(self, copies: tuple[StageCopy, ...]) -> None:
        heat = self._policy.heat_table()
        num_experts = self._policy.geometry.num_experts
        for copy in copies:
            first = self._first_slot + copy.buffer * self._plan.stage_slots
            row = self._store.table[copy.layer]
            chosen = stage_layer(copy.layer, row, heat[copy.layer], first, self._plan.stage_slots)
            slots = np.full(num_experts, -1, np.int32)
            slots[chosen.keys - copy.layer * num_experts] = chosen.slots
            self._staged[copy.layer] = slots
            self._tickets[copy.layer] = self._store.stage(chosen.keys, chosen.slots)
            self.num_staged += len(chosen.keys)
