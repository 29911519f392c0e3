"""One decode loop of policy and simulated device, pipelined as on the real one: the host is a step behind.

step t      device runs with the table as it stands
            host reads the log of step t - 1, advances the policy; copies start, the table changes for t
            + 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.copy_budget import CopyBudget
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.simulate.device import SimulatedDevice
from glm53srv.offload.simulate.timing import StepTime
from glm53srv.offload.split import Split


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step's lanes, its time, how many copies the host started meanwhile, and how many experts it kept."""

    split: Split
    time: StepTime
    num_copies: int
    num_kept: int


class OffloadReplay:
    """Drives a policy and a device through a trace. Owns neither; one thread."""

    def __init__(
        self,
        policy: ResidencyPolicy,
        device: SimulatedDevice,
        budget: CopyBudget,
        cpu_count: NDArray[np.int32],
        num_parts: int = 1,
    ) -> None:
        """cpu_count, num_parts: as split.split_picks takes them."""
        self.policy = policy
        self.device = device
        self.cpu_count = cpu_count
        self.num_parts = num_parts
        self.budget = budget
        self._log: tuple[NDArray[np.integer], NDArray[np.int32]] | None = None
        self._last_ms = 0.0

    def fill(self) -> None:
        """Copy what the policy remembers into its free slots before serving, without counting it."""
        width = self.policy.params.max_in_flight
        while True:
            update = self.policy.advance(self.device.take_landed(), width)
            self.device.apply(update)
            if not self.policy.num_in_flight and not len(update.map_keys):
                return
            self.device.drain_copies()

    def step(self, picks: NDArray[np.integer], num_streams: int) -> ReplayedStep:
        """Run one step: picks integer (layers, rows * top_k)."""
        heat = self.policy.heat_table()
        split = self.device.begin_step(picks, heat, self.cpu_count, self.num_parts)
        self._learn()
        granted = self.budget.grant(self._last_ms)
        update = self.policy.advance(self.device.take_landed(), granted)
        self.budget.spend(update.num_admitted)
        self.device.apply(update)
        kept = self.device.kept
        time = self.device.finish_step(num_streams)
        self._log, self._last_ms = (picks, kept), time.total_ms
        return ReplayedStep(split, time, len(update.copy_keys), int((kept >= 0).sum()))

    def shrink(self, num_slots: int) -> None:
        """Lend slots between two steps, as an engine does: with the last step's log read."""
        self._learn()
        self.policy.shrink(num_slots)

    def settle(self) -> None:
        """Advance once while no step runs."""
        self._learn()
        self.device.apply(self.policy.advance(self.device.take_landed(), 0))

    def _learn(self) -> None:
        """Read the last step's log, once."""
        log, self._log = self._log, None
        if log is not None:
            self.policy.observe(*log)
