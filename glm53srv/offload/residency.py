"""Which experts live in VRAM: one pool of slots for all layers, filled by copies and by offers.

A slot's life. Every transition happens on the host, between steps, inside `advance`, `shrink` or `grow`; or
in `observe`, which learns which offers a step took:

    state      holds                                   leaves to
    FREE       nothing                                 COPYING (admission), OFFERED, LENT (shrink)
    COPYING    a key whose bytes are on their way      RESIDENT (landed); LENT, FREE (landed, called back)
    RESIDENT   a key that steps may read               DRAINING (victim, or shrink), OFFERED (victim)
    DRAINING   nothing; the step that was running      COPYING (its next key), FREE, LENT: at the next advance
               at unmap time may still read it, or     RESIDENT (that step did take it)
               take it
    OFFERED    nothing; a step may take it             RESIDENT (it did), DRAINING (shrink)
    LENT       memory of a prefill                     FREE (grow)

So a slot is unmapped one step before it is overwritten by a copy, and mapped only after its bytes landed:

    advance i      unmap victim          takes effect before step i + 1; step i may be running and reading it
    advance i + 1  issue its copy        step i is over, because its routing log has been read
    advance j      map, if landed        takes effect before step j + 1

With num_offers, copies fill free slots only, and victims are offered to experts of the link (offers.py):

    advance i      unmap victim, offer   both take effect before step i + 1, behind step i in the same stream
    step i + 1     takes it              and maps it itself; step i + 2 reads it
    advance i + 2  learns it             from the log of step i + 1

An expert that takes an offer must not be under way by a copy too. So a copy's key is barred at advance i,
which step i + 1 obeys, and the copy starts at advance i + 1, unless the log of step i has its key.

What the choices rest on (replays of synthetic routes, bench/replay_routing.py; docs/offload.md has the
numbers): copying every miss makes the link the bottleneck and gains little; a second touch within a few
steps picks the same experts for a fraction of the traffic; among the slots that CLOCK would evict next,
taking the coldest keeps an expert that is merely resting. Where admission is free, the coldest of all goes.
Prefill routes are never observed: they would rule the heat of decode.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.clock import Clock
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.offers import OfferBook, Offers
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.split import HEAT_ONE

Ints = NDArray[np.int32]
NONE = np.int32(-1)

HISTORY_STEPS = 4000
"""Decode steps that the history remembers: some conversations, where heat remembers one passage."""


class SlotState(enum.IntEnum):
    """State of a slot; see the table at the head of the file."""

    FREE = 0
    COPYING = 1
    RESIDENT = 2
    DRAINING = 3
    LENT = 4
    OFFERED = 5


class ResidencyPolicy:
    """Owns the assignment of experts to slots. Called by the engine thread only, between steps.

    heat, history: float32 (num_keys,), picks per step over the last tens and the last thousands of decode
    steps; the policy decides by heat, a later run starts with history (heat_file.py). Per decode step:
    `observe` with its routing log, then `advance`. Slots [0, capacity) hold experts, slots
    [capacity, num_slots) are lent or about to be. Invariants: see check_integrity.
    """

    def __init__(
        self, geometry: ExpertGeometry, num_slots: int, params: ResidencyParams | None = None
    ) -> None:
        if num_slots < 1:
            raise ValueError("the pool needs at least one slot")
        self.geometry = geometry
        self.num_slots = num_slots
        self.params = params or ResidencyParams()
        self.capacity = num_slots
        self.heat = np.zeros(geometry.num_keys, np.float32)
        self.history = np.zeros(geometry.num_keys, np.float32)
        self._history_steps = 0
        self._state = np.full(num_slots, SlotState.FREE, np.int8)
        # The key that a slot holds (RESIDENT), receives (COPYING) or will receive (DRAINING).
        self._slot_key = np.full(num_slots, NONE, np.int32)
        self._key_slot = np.full(geometry.num_keys, NONE, np.int32)
        self._clock = Clock(num_slots, self.params.victim_window)
        self._book = OfferBook()
        self._kept: list[Ints] = []  # slots that steps took and no update has mapped
        self._step = 0
        self._last_touch = np.full(geometry.num_keys, np.iinfo(np.int32).min // 2, np.int32)
        self._missed = np.empty(0, np.int32)  # keys without a slot in the last observed step
        self._touched_again = np.empty(0, bool)  # of those, the ones inside the touch window
        self._remembered = np.empty(0, np.int32)  # keys to bring back when slots are free
        self._advances = 0
        self._unmapped_at = np.zeros(num_slots, np.int64)  # the advance that cleared a draining slot's entry
        self._layer_base = (np.arange(geometry.num_layers, dtype=np.int32) * geometry.num_experts)[:, None]
        self._pending_unmap: list[Ints] = []
        self._pending_bar: list[Ints] = []
        self._pending_unbar: list[Ints] = []  # of copies called back

    def table(self) -> Ints:
        """Return the residency table: int32 (layers, experts), the slot of an expert or -1. A fresh array."""
        mapped = np.full(self.geometry.num_keys, NONE, np.int32)
        resident = np.flatnonzero(self._state == SlotState.RESIDENT).astype(np.int32)
        mapped[self._slot_key[resident]] = resident
        return mapped.reshape(self.geometry.num_layers, self.geometry.num_experts)

    def heat_table(self) -> Ints:
        """Return heat as the split rule takes it: int32 (layers, experts), HEAT_ONE = picked every step."""
        scaled = (self.heat * np.float32(HEAT_ONE)).astype(np.int32)
        return scaled.reshape(self.geometry.num_layers, self.geometry.num_experts)

    def slot_states(self) -> NDArray[np.int8]:
        """Return the state of every slot: int8 (num_slots,), a copy."""
        return self._state.copy()

    @property
    def is_lent(self) -> bool:
        """No copy or step can touch the slots beyond the capacity any more."""
        return bool((self._state[self.capacity :] == SlotState.LENT).all())

    @property
    def num_in_flight(self) -> int:
        """Copies that run, and those that start at the next advance."""
        waiting = (self._state == SlotState.DRAINING) & (self._slot_key >= 0)
        return int((self._state == SlotState.COPYING).sum() + waiting.sum())

    def observe(self, picks: NDArray[np.integer], kept: NDArray[np.int32] | None = None) -> None:
        """Take the routing log of one decode step: integer (layers, P) expert ids, -1 where there is none.

        kept: int32 (layers, P), the slots that standing picks took, else -1; None for none. Marks reference
        bits, heats the picked experts, and notes the misses for the next advance. Raises IndexError for an
        expert that does not exist, ValueError for a slot that was not to be taken.
        """
        if picks.size and int(picks.max()) >= self.geometry.num_experts:
            raise IndexError(f"expert {int(picks.max())} of {self.geometry.num_experts}")
        flags = np.zeros(self.geometry.num_keys, bool)
        flags[(picks + self._layer_base)[picks >= 0]] = True
        keys = np.flatnonzero(flags).astype(np.int32)
        self._step += 1
        self.heat *= np.float32(self.params.heat_keep)
        self.heat[keys] += np.float32(1.0 - self.params.heat_keep)
        self._history_steps = min(self._history_steps + 1, HISTORY_STEPS)
        rate = np.float32(1.0 / self._history_steps)
        self.history *= np.float32(1.0) - rate
        self.history[keys] += rate
        if kept is not None:
            self._keep((picks + self._layer_base)[kept >= 0].astype(np.int32), kept[kept >= 0])
        slots = self._key_slot[keys]
        self._clock.touch(slots[slots >= 0])
        self._missed = keys[slots < 0]
        window = self.params.touch_window_steps
        self._touched_again = self._last_touch[self._missed] >= self._step - window
        if window == 0:
            self._touched_again[:] = True
        self._last_touch[keys] = self._step

    def advance(self, landed_slots: NDArray[np.integer], max_admissions: int) -> ResidencyUpdate:
        """Decide the update before the next step.

        landed_slots: slots whose copy has arrived since the last call. max_admissions: experts that may be
        admitted now, from the copy budget. Call it only when the step before the running one is over.
        Raises ValueError for a landed slot that was not being copied.
        """
        self._advances += 1
        mapped = self._land(np.asarray(landed_slots, np.int32))
        copied = [self._end_draining()]
        mapped = np.concatenate([mapped, *self._kept])
        mapped = mapped[self._state[mapped] == SlotState.RESIDENT]  # and not called back since
        self._kept = []
        room = max(0, min(max_admissions, self.params.max_in_flight - self.num_in_flight))
        filled = self._fill_free(room)
        num_admitted, offers, offered = len(filled), None, _taken([])
        if self.params.num_offers:
            offers, offered = self._offer(mapped)
        else:
            copied.append(filled)
            num_admitted += self._replace(room - len(filled), mapped)
        self._missed, self._touched_again = self._missed[:0], self._touched_again[:0]
        copy_slots = np.concatenate(copied)
        unbarred = _taken(self._pending_unbar)
        return ResidencyUpdate(
            unmap_keys=np.concatenate([_taken(self._pending_unmap), unbarred[self._key_slot[unbarred] < 0]]),
            map_keys=self._slot_key[mapped],
            map_slots=mapped,
            copy_keys=self._slot_key[copy_slots],
            copy_slots=copy_slots,
            num_admitted=num_admitted,
            bar_keys=_taken(self._pending_bar),
            offers=offers,
            offered_slots=offered,
        )

    def shrink(self, num_slots: int) -> None:
        """Take num_slots slots from the end of the pool, remembering what they hold.

        They are unmapped by the next advance and lent (`is_lent`) once the running step is over and copies
        into them have landed. Raises ValueError when fewer slots are left.
        """
        if not 0 <= num_slots <= self.capacity:
            raise ValueError(f"cannot lend {num_slots} of {self.capacity} slots")
        if num_slots:
            withdrawn = self._book.withdraw()
            self._state[withdrawn] = SlotState.DRAINING
            self._unmapped_at[withdrawn] = self._advances + 1
        self.capacity -= num_slots
        leaving = np.arange(self.capacity, self.capacity + num_slots)
        keys = self._slot_key[leaving]
        held = keys[keys >= 0]
        state = self._state[leaving]
        resident = leaving[state == SlotState.RESIDENT]
        if self.params.num_offers:
            self._pending_unbar.append(keys[(keys >= 0) & (state != SlotState.RESIDENT)])
        self._drain(resident, self._advances + 1)
        self._slot_key[leaving] = NONE  # a copy under way lands unheeded
        self._state[leaving[state == SlotState.FREE]] = SlotState.LENT
        self._key_slot[held] = NONE
        self._remember(held)

    def grow(self, num_slots: int) -> None:
        """Take back num_slots lent slots; what they held is copied back as the budget allows.

        Raises ValueError when fewer are lent.
        """
        if not 0 <= num_slots <= self.num_slots - self.capacity:
            raise ValueError(f"cannot take back {num_slots} slots, {self.num_slots - self.capacity} are lent")
        returned = np.arange(self.capacity, self.capacity + num_slots)
        self.capacity += num_slots
        self._state[returned[self._state[returned] == SlotState.LENT]] = SlotState.FREE

    def warm_start(self, history: NDArray[np.float32]) -> None:
        """Begin with the history of an earlier run: float32 (num_keys,). Its hottest experts fill free slots.

        Raises ValueError for a wrong shape.
        """
        if history.shape != self.heat.shape:
            raise ValueError(f"history has shape {history.shape}, need {self.heat.shape}")
        self.heat[:] = history
        self.history[:] = history
        self._history_steps = HISTORY_STEPS
        self._remember(np.flatnonzero(history > 0).astype(np.int32))

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        state, keys = self._state, self._slot_key
        held = np.flatnonzero(keys >= 0)
        assert len(np.unique(keys[held])) == len(held), "an expert has two slots"
        assert (self._key_slot[keys[held]] == held).all(), "a slot's expert does not know it"
        assert (self._key_slot >= 0).sum() == len(held), "an expert believes in a slot that is not its own"
        empty = np.isin(state, (SlotState.FREE, SlotState.LENT, SlotState.OFFERED))
        assert (keys[empty] < 0).all(), "an empty slot has a key"
        assert (keys[state == SlotState.RESIDENT] >= 0).all(), "a resident slot without a key"
        assert (keys[self.capacity :] < 0).all(), "a slot beyond the capacity still serves"
        assert not (state[self.capacity :] == SlotState.FREE).any(), "a slot beyond the capacity is free"
        assert not (state[: self.capacity] == SlotState.LENT).any(), "a slot within the capacity is lent"
        offered = np.flatnonzero(state == SlotState.OFFERED)
        assert sorted(self._book.open_slots) == offered.tolist(), "the offers are not the offered slots"
        assert (offered < self.capacity).all(), "a slot beyond the capacity is offered"
        assert self.num_in_flight <= self.params.max_in_flight, "too many copies in flight"

    def _land(self, slots: Ints) -> Ints:
        """Finish copies; return the slots to map."""
        if not (self._state[slots] == SlotState.COPYING).all():
            raise ValueError("a copy landed in a slot that was not being copied to")
        wanted = self._slot_key[slots] >= 0
        kept, dropped = slots[wanted], slots[~wanted]
        self._state[kept] = SlotState.RESIDENT
        self._clock.touch(kept)
        self._release(dropped)
        return kept

    def _end_draining(self) -> Ints:
        """Start the copies into slots whose entry an earlier advance cleared; return those slots."""
        over = (self._state == SlotState.DRAINING) & (self._unmapped_at < self._advances)
        slots = np.flatnonzero(over).astype(np.int32)
        wanted = self._slot_key[slots] >= 0
        self._state[slots[wanted]] = SlotState.COPYING
        self._release(slots[~wanted])
        return slots[wanted]

    def _fill_free(self, room: int) -> Ints:
        """Admit the hottest misses and remembered keys into free slots; return the slots."""
        self._remembered = self._remembered[self._key_slot[self._remembered] < 0]
        free = np.flatnonzero(self._state[: self.capacity] == SlotState.FREE).astype(np.int32)[:room]
        if not len(free):
            return free
        keys = self._hottest(np.union1d(self._missed, self._remembered), len(free))
        slots = free[: len(keys)]
        self._slot_key[slots] = keys
        self._key_slot[keys] = slots
        self._state[slots] = SlotState.COPYING
        if self.params.num_offers:  # not before the running step, which may keep them, is over
            self._state[slots] = SlotState.DRAINING
            self._unmapped_at[slots] = self._advances
            self._pending_bar.append(keys)
        return slots

    def _keep(self, keys: Ints, slots: Ints) -> None:
        """Follow a step that kept keys in slots, both int32, in its order. Raises ValueError: see observe."""
        is_open = self._state[slots] == SlotState.OFFERED
        is_withdrawn = (self._state[slots] == SlotState.DRAINING) & (self._slot_key[slots] < 0)
        self._book.take(slots[is_open])
        reserved = self._key_slot[keys]
        reserved = reserved[reserved >= 0]  # for copies that have not begun: barred when the step ran already
        if not (is_open | is_withdrawn).all() or not (self._state[reserved] == SlotState.DRAINING).all():
            raise ValueError(f"experts {keys.tolist()} cannot have taken slots {slots.tolist()}")
        self._slot_key[reserved] = NONE
        self._key_slot[keys] = NONE
        stays = slots < self.capacity
        self._state[slots[stays]] = SlotState.RESIDENT
        self._slot_key[slots[stays]] = keys[stays]
        self._key_slot[keys[stays]] = slots[stays]
        self._kept.append(slots[stays])
        self._unmapped_at[slots[~stays]] = self._advances + 1  # called back: it has to drain anew
        self._pending_unmap.append(keys[~stays])
        self._remember(keys[~stays])

    def _offer(self, just_mapped: Ints) -> tuple[Offers, Ints]:
        """Offer free slots, then those of the coldest experts, until as many are open as should be.

        just_mapped: as for _replace. Gives all offers, and the slots of the new ones.
        """
        most = min(self.params.num_offers, max(1, self.capacity // 16), self.capacity)
        missing = max(0, most - self._book.num_open)
        free = np.flatnonzero(self._state[: self.capacity] == SlotState.FREE).astype(np.int32)
        evictable = self._state == SlotState.RESIDENT
        evictable[just_mapped] = False
        resident = np.flatnonzero(evictable).astype(np.int32)
        heat = self.heat[self._slot_key[resident]]
        coldest = np.argsort(heat, kind="stable")
        victims = resident[coldest[: max(0, missing - len(free))]]
        offered = np.concatenate([free[:missing], victims])
        if len(free) > missing:
            # Who takes a free slot displaces what would be copied into the last of them.
            waiting = self._remembered[self._key_slot[self._remembered] < 0]
            last = self._hottest(waiting, len(free) - missing)[len(free) - missing - 1 :]
            least = float(self.heat[last].sum())  # of one expert, or none
        else:
            stays = coldest[len(victims) :]
            least = float(heat[stays[0]]) + self.params.offer_heat_gain if len(stays) else 0.0
        self._drain(victims, self._advances)
        self._slot_key[offered] = NONE
        self._state[offered] = SlotState.OFFERED
        self._book.add(offered)
        return self._book.published(int(least * HEAT_ONE)), offered

    def _replace(self, room: int, just_mapped: Ints) -> int:
        """Let misses of second touch, hottest first, take the slots of victims; return how many did.

        just_mapped: slots that this advance maps; unmapping them in the same update would contradict it.
        """
        wanted = self._missed[self._touched_again]
        keys = self._hottest(wanted[self._key_slot[wanted] < 0], room)
        if not len(keys):
            return 0
        evictable = self._state[: self.capacity] == SlotState.RESIDENT
        evictable[just_mapped] = False
        # Of a slot without a key, which cannot go, this is the heat of another expert.
        slots = self._clock.sweep(len(keys), evictable, self.heat[self._slot_key[: self.capacity]])
        keys = keys[: len(slots)]
        hotter = self.heat[keys] - self.heat[self._slot_key[slots]] > self.params.min_heat_gain
        keys, slots = keys[hotter], slots[hotter]
        self._drain(slots, self._advances)
        self._slot_key[slots] = keys
        self._key_slot[keys] = slots
        return len(keys)

    def _drain(self, slots: NDArray[np.integer], unmapped_at: int) -> None:
        """Unmap resident slots in the advance numbered unmapped_at; their keys lose their slot."""
        keys = self._slot_key[slots]
        self._key_slot[keys] = NONE
        self._state[slots] = SlotState.DRAINING
        self._unmapped_at[slots] = unmapped_at
        self._pending_unmap.append(keys)

    def _release(self, slots: Ints) -> None:
        """Put slots that hold nothing where they belong: free, or lent beyond the capacity."""
        self._slot_key[slots] = NONE
        self._state[slots] = np.where(slots < self.capacity, SlotState.FREE, SlotState.LENT)

    def _hottest(self, keys: Ints, count: int) -> Ints:
        """Return up to count keys, hottest first, the lower key first among equals."""
        return keys[np.argsort(-self.heat[keys], kind="stable")[:count]]

    def _remember(self, keys: Ints) -> None:
        """Note keys for re-warming, the hottest num_slots of all noted ones."""
        self._remembered = self._hottest(np.union1d(self._remembered, keys), self.num_slots)


def _taken(pending: list[Ints]) -> Ints:
    """Empty a list of arrays of keys; gives them as one."""
    joined = np.concatenate([np.empty(0, np.int32), *pending])
    pending.clear()
    return joined
