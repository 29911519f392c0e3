"""A staged prefill chunk on the simulated device: loan, staging and reads, checked like decode steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.simulate.device import SimulatedDevice
from glm53srv.offload.staging import StageCopy, StagingSchedule, stage_layer
from glm53srv.offload.vram_plan import VramPlan


@dataclass(frozen=True, slots=True)
class PrefillLayer:
    """Where a layer read its experts, and how long it waited for copies."""

    num_staged: int
    num_resident: int
    num_in_place: int
    wait_ms: float


class StagedPrefill:
    """Runs one chunk, layer by layer, over slots that residency has lent. One thread.

    Decode steps may run between two layers. The lent slots are those from the end of the pool: buffer A, then
    buffer B, each plan.stage_slots long; what is lent beyond is scribbled over as activations would.
    """

    def __init__(self, policy: ResidencyPolicy, device: SimulatedDevice, plan: VramPlan) -> None:
        """Take the lent slots. Raises ValueError while residency still uses them, or too few are lent."""
        if not policy.is_lent:
            raise ValueError("the slots are not lent yet")
        if policy.num_slots - policy.capacity < 2 * plan.stage_slots:
            raise ValueError("too few slots are lent for two staging buffers")
        self._policy = policy
        self._device = device
        self._plan = plan
        self._first_slot = policy.capacity
        self._staged: dict[int, NDArray[np.int32]] = {}  # int32 (experts,): staged slot or -1, by layer
        self._tickets: dict[int, int] = {}
        self.schedule = StagingSchedule(policy.geometry.num_layers)
        device.scribble(np.arange(policy.capacity, policy.num_slots))
        self._issue(self.schedule.start())

    def run_layer(self, experts: NDArray[np.integer], compute_ms: float) -> PrefillLayer:
        """Run the next layer over distinct experts; copies go on while it computes.

        Raises WrongExpertRead if a slot does not hold what the layer expects, ValueError after the last.
        """
        if self.schedule.is_done:
            raise ValueError("the chunk has no layer left")
        layer = self.schedule.next_layer
        wait_ms = self._device.wait(self._tickets.pop(layer))
        self.schedule.landed(layer)
        self.schedule.begin_layer(layer)
        staged = self._staged.pop(layer)[experts]
        resident = self._device.table[layer][experts]
        slots = np.where(staged >= 0, staged, resident)
        is_read = slots >= 0
        self._device.elapse(compute_ms)
        self._device.check_reads(np.full(int(is_read.sum()), layer), experts[is_read], slots[is_read])
        self._issue(self.schedule.end_layer(layer))
        num_staged = int((staged >= 0).sum())
        return PrefillLayer(num_staged, int(is_read.sum()) - num_staged, int((~is_read).sum()), wait_ms)

    def abort(self) -> None:
        """Give the chunk up; waits for copies under way, so that the slots can be given back."""
        for layer in self.schedule.abort():
            self._device.wait(self._tickets.pop(layer))

    def _issue(self, copies: tuple[StageCopy, ...]) -> None:
        heat = self._policy.heat_table()
        for copy in copies:
            first = self._first_slot + copy.buffer * self._plan.stage_slots
            row = self._device.table[copy.layer]
            chosen = stage_layer(copy.layer, row, heat[copy.layer], first, self._plan.stage_slots)
            slots = np.full(self._policy.geometry.num_experts, -1, np.int32)
            slots[chosen.keys - copy.layer * self._policy.geometry.num_experts] = chosen.slots
            self._staged[copy.layer] = slots
            self._tickets[copy.layer] = self._device.stage(chosen.keys, chosen.slots)
