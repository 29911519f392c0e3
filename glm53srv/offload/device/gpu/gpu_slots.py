"""Cache slots in VRAM, the residency table beside them, and the copy engine that fills them.

    host                          copy stream                     main stream
    apply(update), step i         copies into unmapped slots      table changes, behind step i's kernels
    take_landed, step i + 1       events passed: landed           reads the table and the slots
    stage(keys, slots)            behind the main stream's end    .. wait(ticket) .. reads them
    lend, take_back               idle                            idle (the caller sees to it)

Lending frees whole chunks of slots (slot_chunks.py): their memory goes back to the allocator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.copy_runs import runs_of
from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.device.gpu.registered import host_tensor
from glm53srv.offload.device.gpu.slot_chunks import SlotChunks
from glm53srv.offload.device.gpu.table_kernel import launch_update
from glm53srv.offload.residency_update import ResidencyUpdate

POISON = 0xA5


class GpuSlots:
    """Owns slot memory, table and copy stream (a slot_memory.SlotMemory). Engine thread only.

    table: int32 (layers, experts) on the host, as the next step will read it. device_table: the same on the
    device, as of the point in the main stream where the last `apply` was called, and with what steps have
    kept since. addresses: int64 (slots,) on the device, 0 for a slot whose memory is lent.
    """

    def __init__(
        self,
        arena: ExpertArena,
        num_slots: int,
        chunk_slots: int,
        device: torch.device,
        *,
        poisons: bool = False,
    ) -> None:
        """Allocate the slots. poisons: overwrite a slot before each copy into it, so that a table entry that
        comes too early shows in the results; for tests. Raises torch.OutOfMemoryError."""
        geometry = arena.geometry
        self._record_bytes = arena.layout.record_bytes
        self._home = host_tensor(arena.region).view(geometry.num_keys, self._record_bytes)
        self._device = device
        self._poisons = poisons
        self.table = np.full((geometry.num_layers, geometry.num_experts), -1, np.int32)
        self.device_table = torch.full(self.table.shape, -1, dtype=torch.int32, device=device)
        self.addresses = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.copy_stream = torch.cuda.Stream(device)
        self._reader = HostReader()
        self._flying: deque[tuple[torch.cuda.Event, list[int]]] = deque()
        self._tickets: dict[int, torch.cuda.Event] = {}
        self._num_tickets = 0
        self._chunks = SlotChunks(num_slots, chunk_slots, self._record_bytes, device)
        self._send_addresses()

    @property
    def num_bytes(self) -> int:
        """VRAM held now."""
        return self._chunks.num_bytes

    def apply(self, update: ResidencyUpdate) -> None:
        """Change the table behind what the main stream holds, and issue the copies now."""
        flat = self.table.reshape(-1)
        flat[update.unmap_keys] = -1
        flat[update.map_keys] = update.map_slots
        parts = [update.unmap_keys, update.bar_keys, update.map_keys, update.map_slots]
        if any(map(len, parts)):
            launch_update(self.device_table, *self._pin(parts))
        self.scribble(update.offered_slots)  # behind the running step, as what takes them will be
        if len(update.copy_keys):
            keys, slots = update.copy_keys.tolist(), update.copy_slots.tolist()
            self._flying.append((self._copy(keys, slots), slots))

    def stage(self, keys: NDArray[np.int32], slots: NDArray[np.int32]) -> int:
        """Issue a prefill's copies into lent slots, behind what the main stream holds; gives a ticket."""
        self._num_tickets += 1
        self.copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._tickets[self._num_tickets] = self._copy(keys.tolist(), slots.tolist())
        return self._num_tickets

    def wait(self, ticket: int) -> None:
        """Let the main stream wait for a ticket's copies; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._tickets.pop(ticket))

    def drain(self) -> None:
        """Wait on the host until all copies have landed and the table is changed."""
        torch.cuda.synchronize(self._device)

    def take_landed(self) -> NDArray[np.int32]:
        """Give the slots of residency's copies that landed since the last call: int32, in order."""
        landed: list[int] = []
        while self._flying and self._flying[0][0].query():
            landed += self._flying.popleft()[1]
        return np.array(landed, np.int32)

    def scribble(self, slots: NDArray[np.integer]) -> None:
        """Poison slots if this store does so."""
        if self._poisons:
            for slot in slots.tolist():
                if self._chunks.has_memory(slot):
                    self._chunks.slot(slot).fill_(POISON)

    def has_memory(self, slots: range) -> bool:
        """Tell whether none of these slots is lent."""
        return all(map(self._chunks.has_memory, slots))

    def lend(self, slots: range) -> None:
        """Free what memory whole chunks among lent slots have; both streams must be idle."""
        if self._chunks.free(slots):
            self._send_addresses()

    def take_back(self, slots: range) -> None:
        """Allocate again what lend() freed. Raises torch.OutOfMemoryError when the memory is not back."""
        self._chunks.allocate(slots)
        self._send_addresses()

    def verify(self, keys: Sequence[int]) -> list[int]:
        """Compare resident experts with their home copies, byte for byte; gives the keys that differ.

        Waits for both streams. Keys that are not resident are passed over.
        """
        torch.cuda.synchronize(self._device)
        wrong = []
        flat = self.table.reshape(-1)
        for key in keys:
            slot = int(flat[key])
            if slot >= 0 and not torch.equal(self._chunks.slot(slot).cpu(), self._home[key]):
                wrong.append(key)
        return wrong

    def close(self) -> None:
        """Free the slots; both streams must be idle. Idempotent."""
        self._flying.clear()
        self._tickets.clear()
        self._chunks.free_all()

    def _copy(self, keys: list[int], slots: list[int]) -> torch.cuda.Event:
        with torch.cuda.stream(self.copy_stream):
            for key, slot, count in runs_of(keys, slots, self._chunks.chunk_slots):
                target = self._chunks.slots(slot, count)
                if self._poisons:
                    target.fill_(POISON)
                target.copy_(self._home[key : key + count], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.copy_stream)
        return event

    def _send_addresses(self) -> None:
        self.addresses.copy_(torch.from_numpy(self._chunks.addresses()))

    def _pin(self, parts: list[NDArray[np.int32]]) -> list[torch.Tensor]:
        """Give arrays where a kernel reads them, each at a multiple of 16 bytes: one kernel fits all."""
        places = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)])
        joined = np.zeros(places[-1], np.int32)
        for place, part in zip(places, parts, strict=False):
            joined[place : place + len(part)] = part
        pinned = self._reader.pin(joined)
        return [pinned[place : place + len(part)] for place, part in zip(places, parts, strict=False)]
