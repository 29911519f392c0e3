"""Cache slots in host memory, and the copy engine that fills them: the simulated GPU's side of an update.

It obeys the same updates as a GPU will, in the same order, and is as unforgiving: a slot holds garbage from
the moment its copy is issued until the copy has landed, so a table entry that comes too early, or goes too
late, shows in the results.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.region import Region
from glm53srv.offload.offers import Offers
from glm53srv.offload.residency_update import ResidencyUpdate

POISON = 0xA5


class SlotStore:
    """Owns slot memory and the residency table. Called by the engine thread only.

    table: int32 (layers, experts), slot or -1, as the host knows it. true_table: the same as steps read it,
    with what they have kept, and without the updates behind the one that runs. offers: what the next step
    may take.
    """

    def __init__(self, arena: ExpertArena, num_slots: int) -> None:
        """Map the slots. Raises MachineError."""
        geometry = arena.geometry
        self._arena = arena
        self._region = Region(num_slots * geometry.expert_bytes)
        self._slots = self._region.array().reshape(num_slots, -1)
        self._slots[:] = POISON
        self.num_slots = num_slots
        self.table = np.full((geometry.num_layers, geometry.num_experts), -1, np.int32)
        self.true_table = self.table.copy()
        self.offers: Offers | None = None
        self._waiting: list[ResidencyUpdate] = []
        self._is_running = False
        self._queue: deque[tuple[int, int, int]] = deque()  # (key, slot, ticket), in copy order
        self._landed: list[int] = []
        self._num_tickets = 0

    def apply(self, update: ResidencyUpdate) -> None:
        """Change table and offers for the next step, behind the running one, and issue the copies."""
        flat = self.table.reshape(-1)
        flat[update.unmap_keys] = -1
        flat[update.map_keys] = update.map_slots
        self._waiting.append(update)
        if not self._is_running:
            self._change()
        self._enqueue(update.copy_keys, update.copy_slots, ticket=0)

    def begin_step(self) -> None:
        """Begin a decode step: updates wait for its end."""
        self._is_running = True

    def end_step(self) -> None:
        """End it."""
        self._is_running = False
        self._change()

    def keep(self, layer: int, experts: NDArray[np.integer], slots: NDArray[np.int32]) -> None:
        """Let the running step put experts of a layer into slots that it took, and into the table."""
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            self._slots[slot] = self._arena.records[layer * self._arena.geometry.num_experts + expert]
            self.true_table[layer, expert] = slot

    def stage(self, keys: NDArray[np.int32], slots: NDArray[np.int32]) -> int:
        """Issue a prefill's copies into lent slots; gives a ticket for `wait`."""
        self._num_tickets += 1
        self._enqueue(keys, slots, self._num_tickets)
        return self._num_tickets

    def wait(self, ticket: int) -> None:
        """Let the copy engine run until everything of a ticket has landed."""
        last = max((index + 1 for index, entry in enumerate(self._queue) if entry[2] == ticket), default=0)
        self.move(last)

    def move(self, num_copies: int) -> None:
        """Let up to num_copies copies land."""
        for _ in range(min(num_copies, len(self._queue))):
            key, slot, ticket = self._queue.popleft()
            self._slots[slot] = self._arena.records[key]
            if ticket == 0:
                self._landed.append(slot)

    def drain(self) -> None:
        """Let all copies land."""
        self.move(len(self._queue))

    def take_landed(self) -> NDArray[np.int32]:
        """Give residency's slots whose copies landed since the last call: int32, in order."""
        landed, self._landed = np.array(self._landed, np.int32), []
        return landed

    def scribble(self, slots: NDArray[np.integer]) -> None:
        """Overwrite slots, as activations in lent memory do."""
        self._slots[slots] = POISON

    def addresses(self, layer: int, slots: NDArray[np.integer]) -> NDArray[np.uintp]:
        """Say where each expert of a layer is read: in its slot, or at home for -1.

        slots: integer (experts,). Gives addresses of records, uintp (experts,).
        """
        size = np.uintp(self._arena.geometry.expert_bytes)
        expert = np.arange(len(slots), dtype=np.uintp)
        home = np.uintp(self._arena.address(layer, 0)) + expert * size
        return np.where(slots >= 0, np.uintp(self._region.address) + slots.astype(np.uintp) * size, home)

    def _change(self) -> None:
        for update in self._waiting:
            update.change(self.true_table.reshape(-1))
            self.offers = update.offers
            self.scribble(update.offered_slots)
        self._waiting.clear()

    def _enqueue(self, keys: NDArray[np.int32], slots: NDArray[np.int32], ticket: int) -> None:
        self.scribble(slots)
        self._queue.extend(
            (key, slot, ticket) for key, slot in zip(keys.tolist(), slots.tolist(), strict=True)
        )
