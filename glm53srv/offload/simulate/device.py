"""The simulated device: slots, residency table, copy engine and clock, all in host memory.

It obeys and checks. A copy poisons its slot when it is issued and fills it when its bytes have landed; a
step reads through the table as it was when the step began. So a slot that is overwritten while a running
step may read it, or mapped before its bytes arrived, or lent too early, is caught at the first pick that
reads it.

A step that takes offers fills their slots and changes the table itself, when it ends; only then, in the order
of a stream, take the updates effect that the host has sent beside it. The host learns what was taken from the
log, so the table as it knows it (`table`) may lack what the last step kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.offers import Offers, keep_picks
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.simulate.timing import StepTime, StepTimer
from glm53srv.offload.split import Lane, Split, split_picks

POISON = 0xA5


class WrongExpertRead(Exception):
    """A step read a slot that did not hold the expert it was looking for."""


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """picks, kept: int32 (layers, P). table: int32 (layers, experts), as the step reads it."""

    picks: NDArray[np.int32]
    table: NDArray[np.int32]
    split: Split
    kept: NDArray[np.int32]


class SimulatedDevice:
    """Executes residency updates and steps. One thread.

    home: uint8 (num_keys, n), stand-ins for the experts' bytes, or None to track owners only. Order of
    calls in one step: begin_step, then any apply / stage / scribble of the host working meanwhile, then
    finish_step.
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        num_slots: int,
        timer: StepTimer,
        home: NDArray[np.uint8] | None = None,
    ) -> None:
        self.geometry = geometry
        self.now_ms = 0.0
        self._timer = timer
        self._copy_rate = timer.profile.copy_gb_s * 1e6  # bytes per ms
        self._home = home
        self._bytes = None if home is None else np.full((num_slots, home.shape[1]), POISON, np.uint8)
        self._owner = np.full(num_slots, -1, np.int32)  # the key whose bytes are whole in a slot
        self._table = np.full((geometry.num_layers, geometry.num_experts), -1, np.int32)
        self._true_table = self._table.copy()  # as the next step will read it
        self._offers: Offers | None = None
        self._head = 0
        self._waiting: list[ResidencyUpdate] = []  # updates behind the running step
        self._queue: deque[tuple[int, int, int]] = deque()  # (key, slot, ticket) in copy order
        self._queue_bytes = 0.0
        self._landed: list[int] = []
        self._num_tickets = 0
        self._running: _RunningStep | None = None

    @property
    def table(self) -> NDArray[np.int32]:
        """The residency table as the host knows it: int32 (layers, experts), slot or -1, a copy."""
        return self._table.copy()

    def begin_step(
        self,
        picks: NDArray[np.integer],
        heat: NDArray[np.int32],
        cpu_count: NDArray[np.int32],
        num_parts: int = 1,
    ) -> Split:
        """Start a decode step over picks, integer (layers, P); return its lanes (the routing log).

        cpu_count, num_parts: as split.split_picks takes them.
        """
        table = self._true_table.copy()
        split = split_picks(picks, table, heat, cpu_count, num_parts=num_parts)
        kept = np.full(picks.shape, -1, np.int32)
        if self._offers is not None:
            keeping = keep_picks(picks, split, table, heat, self._offers, self._head)
            kept, self._head = keeping.slots, keeping.head
        self._running = _RunningStep(picks.astype(np.int32), table, split, kept)
        return split

    @property
    def kept(self) -> NDArray[np.int32]:
        """The slots that the running step's picks take: int32 (layers, P), -1 for none; part of its log.

        Raises ValueError when no step is running.
        """
        return self._step().kept

    def apply(self, update: ResidencyUpdate) -> None:
        """Execute an update: table entries and offers for the next step, copies from now on."""
        flat = self._table.reshape(-1)
        flat[update.unmap_keys] = -1
        flat[update.map_keys] = update.map_slots
        self._waiting.append(update)
        if self._running is None:
            self._change()
        self._enqueue(update.copy_keys, update.copy_slots, ticket=0)

    def stage(self, keys: NDArray[np.int32], slots: NDArray[np.int32]) -> int:
        """Queue a prefill's copies of experts into lent slots; return a ticket for `wait`."""
        self._num_tickets += 1
        self._enqueue(keys, slots, self._num_tickets)
        return self._num_tickets

    def wait(self, ticket: int) -> float:
        """Let time pass until a staged batch has landed; return the wait in ms."""
        ahead = max((i + 1 for i, entry in enumerate(self._queue) if entry[2] == ticket), default=0)
        behind = (len(self._queue) - ahead) * self.geometry.expert_bytes
        wait_ms = max(0.0, self._queue_bytes - behind) / self._copy_rate if ahead else 0.0
        self.now_ms += wait_ms
        self._move(wait_ms * self._copy_rate + (1.0 if ahead else 0.0))
        return wait_ms

    def scribble(self, slots: NDArray[np.integer]) -> None:
        """Overwrite slots with something else, as activations in lent memory do."""
        self._owner[slots] = -1
        if self._bytes is not None:
            self._bytes[slots] = POISON

    def finish_step(self, num_streams: int) -> StepTime:
        """End the running step: check every read, move the clock, land copies.

        Raises WrongExpertRead, naming layer, expert and slot.
        """
        step, self._running = self._step(), None
        split = step.split
        layer, place = np.nonzero(split.lanes == Lane.VRAM)
        expert = step.picks[layer, place]
        self.check_reads(layer, expert, step.table[layer, expert])
        self._keep(step)
        self._change()
        time = self._timer.step(
            split.num_hits, split.link_load, split.cpu_load, num_streams, self._queue_bytes
        )
        self.now_ms += time.total_ms
        self._move(time.copied_bytes)
        return time

    def check_reads(
        self, layer: NDArray[np.integer], expert: NDArray[np.integer], slots: NDArray[np.integer]
    ) -> None:
        """Check that slots hold these experts whole; arrays of one length. Raises WrongExpertRead."""
        keys = layer * self.geometry.num_experts + expert
        wrong = self._owner[slots] != keys
        if self._bytes is not None and self._home is not None:
            wrong |= (self._bytes[slots] != self._home[keys]).any(axis=1)
        if wrong.any():
            i = int(wrong.argmax())
            raise WrongExpertRead(f"layer {layer[i]}, expert {expert[i]}: slot {slots[i]} does not hold it")

    def elapse(self, span_ms: float) -> None:
        """Let time pass outside decode steps; the copy engine works alone."""
        self.now_ms += span_ms
        self._move(min(self._queue_bytes, span_ms * self._copy_rate))

    def drain_copies(self) -> float:
        """Wait for the copy engine to end all copies; return the wait in ms."""
        wait_ms = self._queue_bytes / self._copy_rate
        self.now_ms += wait_ms
        self._move(self._queue_bytes + 1.0)
        return wait_ms

    def take_landed(self) -> NDArray[np.int32]:
        """Return residency's slots whose bytes arrived since the last call: int32, in order."""
        landed, self._landed = np.array(self._landed, np.int32), []
        return landed

    def _step(self) -> _RunningStep:
        if self._running is None:
            raise ValueError("no step is running")
        return self._running

    def _keep(self, step: _RunningStep) -> None:
        """Put what a step has kept into its slots, and into the table.

        Raises WrongExpertRead for a slot that the table gives to another expert.
        """
        layer, place = np.nonzero(step.kept >= 0)
        keys = layer * self.geometry.num_experts + step.picks[layer, place]
        slots = step.kept[layer, place]
        if np.isin(slots, self._true_table).any():
            raise WrongExpertRead(f"slots {slots.tolist()} were taken, one of them while it was mapped")
        self._fill(keys, slots)
        self._true_table.reshape(-1)[keys] = slots

    def _change(self) -> None:
        """Let the updates that were sent beside the last step take effect."""
        for update in self._waiting:
            update.change(self._true_table.reshape(-1))
            self._offers = update.offers
            self.scribble(update.offered_slots)
        self._waiting.clear()

    def _fill(self, keys: NDArray[np.integer], slots: NDArray[np.integer]) -> None:
        self._owner[slots] = keys
        if self._bytes is not None and self._home is not None:
            self._bytes[slots] = self._home[keys]

    def _enqueue(self, keys: NDArray[np.int32], slots: NDArray[np.int32], ticket: int) -> None:
        """Append copies to the queue; from now on their slots hold nothing whole."""
        self.scribble(slots)
        self._queue.extend(
            (key, slot, ticket) for key, slot in zip(keys.tolist(), slots.tolist(), strict=True)
        )
        self._queue_bytes += len(keys) * self.geometry.expert_bytes

    def _move(self, num_bytes: float) -> None:
        """Let the copy engine move num_bytes; what is complete lands."""
        self._queue_bytes = max(0.0, self._queue_bytes - num_bytes)
        pending = int(np.ceil((self._queue_bytes - 0.5) / self.geometry.expert_bytes))
        while len(self._queue) > max(0, pending):
            key, slot, ticket = self._queue.popleft()
            self._fill(np.array([key]), np.array([slot]))
            if ticket == 0:
                self._landed.append(slot)
