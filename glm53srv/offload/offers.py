"""Which experts of the link lane are kept: the rule of offers. A device kernel must give the same integers.

An expert of the link lane is copied into VRAM for its layer, and its place there is then another's. If it is
worth a slot of the cache, it is copied into one that the host has offered, and the table says so at once: an
admission that costs the link nothing. Numbers are 32 bits wide; offers are numbered from 0, and the numbers
wrap around. With the words of `Offers`, and `head`, the number of the next offer, which lives on the device
and begins as 0:

    1. Before a layer: if head is behind `first`, head = first.
    2. A standing pick (split.py) is wanted if its lane is LINK and it is among the first `num_landing` of its
       layer's of the lanes LINK and SPLIT that were not fetched ahead (look_ahead.py), so that it is copied
       at all, and whole, or was fetched ahead; its table entry is ABSENT; and its heat is at least
       `threshold`.
    3. In the order of picks, wanted picks take the offers head, head + 1, ... as long as these are before
       `tail`; then head is the first that was not taken, for the next layer to begin with.
    4. Offer n is the slot ring[n mod RING_SLOTS]. Who takes it is copied there and has it as table entry.

Why no key ever has two slots, and no slot is read too early: docs/offload.md.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.split import Lane, Split

Ints = NDArray[np.int32]

ABSENT = -1
"""Table entry of an expert without a slot."""
BARRED = -2
"""The same, of one that must not be kept, because a copy of it is on its way or about to be."""

RING_SLOTS = 64
"""Places of the ring of offers, a power of two: as many as may be open at once."""


def wrapped(number: int) -> int:
    """Give a number as 32 bits with sign hold it."""
    return (number + 2**31) % 2**32 - 2**31


@dataclass(frozen=True, slots=True)
class Offers:
    """What a step may take; see the rule. ring: int32 (RING_SLOTS,), never changed once it is here.

    threshold: heat as split.HEAT_ONE counts it. first, tail: numbers of offers, wrapped.
    """

    threshold: int
    first: int
    tail: int
    ring: Ints

    def words(self) -> Ints:
        """Give them as kernels read them: int32 (3 + RING_SLOTS,)."""
        return np.concatenate([np.array([self.threshold, self.first, self.tail], np.int32), self.ring])


NUM_WORDS = 3 + RING_SLOTS


@dataclass(frozen=True, slots=True)
class Keeping:
    """slots: int32 (layers, P), the slot that a standing pick took, or -1. head: number of the next offer."""

    slots: Ints
    head: int


def keep_picks(
    picks: NDArray[np.integer],
    split: Split,
    entries: Ints,
    heat: Ints,
    offers: Offers,
    head: int,
    num_landing: int = 2**31,
) -> Keeping:
    """Apply the rule to the next layers of a step: one, or several that follow each other.

    picks: integer (layers, P). split: of these picks. entries, heat: int32 (layers, experts), the layers'
    rows of the tables, not changed here. num_landing: experts of a layer that are copied, not read in place.
    """
    layer = np.arange(len(picks))[:, None]
    known = np.maximum(picks, 0)
    is_wanted = split.standing & (split.lanes == Lane.LINK)
    lands = (is_wanted | (split.standing & (split.lanes == Lane.SPLIT))) & ~split.is_ahead
    is_wanted &= (lands.cumsum(axis=1) <= num_landing) | split.is_ahead
    is_wanted &= (entries[layer, known] == ABSENT) & (heat[layer, known] >= offers.threshold)
    if wrapped(offers.first - head) > 0:
        head = offers.first
    place = np.flatnonzero(is_wanted)[: max(0, wrapped(offers.tail - head))]
    numbers = (head + np.arange(len(place))) % RING_SLOTS
    slots = np.full(picks.size, -1, np.int32)
    slots[place] = offers.ring[numbers]
    return Keeping(slots.reshape(picks.shape), wrapped(head + len(place)))


NUM_OFFERS = 24
"""Offers that are open at once: a step keeps 7 to 11 experts, and the host is two steps behind. In replays of
one to four streams 16 are too few and 32 lie idle (docs/offload.md)."""


class OfferBook:
    """The host's list of what it has offered. Owned by residency.ResidencyPolicy.

    An offer is open until the log shows that it was taken, or until all are withdrawn.
    """

    def __init__(self) -> None:
        self._ring = np.full(RING_SLOTS, -1, np.int32)
        self._first = 0
        self._tail = 0
        self._open: deque[int] = deque()

    @property
    def num_open(self) -> int:
        """Offers that a step may still take."""
        return len(self._open)

    @property
    def open_slots(self) -> list[int]:
        """Slots that a step may take, in the order in which it does."""
        return list(self._open)

    def add(self, slots: Ints) -> None:
        """Offer more slots. Raises ValueError for more than the ring holds."""
        if len(self._open) + len(slots) > RING_SLOTS:
            raise ValueError(f"{len(self._open)} + {len(slots)} offers, the ring holds {RING_SLOTS}")
        self._ring[(self._tail + np.arange(len(slots))) % RING_SLOTS] = slots
        self._tail += len(slots)
        self._open.extend(slots.tolist())

    def take(self, slots: Ints) -> None:
        """Note that open offers were taken. Raises ValueError unless they are the next, in their order."""
        taken = [self._open.popleft() for _ in range(min(len(slots), len(self._open)))]
        if taken != slots.tolist():
            raise ValueError(f"slots {slots.tolist()} were taken where {taken} were offered next")

    def withdraw(self) -> Ints:
        """Withdraw all open offers; gives their slots, which steps that do not know it may still take."""
        withdrawn = np.array(self._open, np.int32)
        self._open.clear()
        self._first = self._tail
        return withdrawn

    def published(self, threshold: int) -> Offers:
        """Give what the next step goes by."""
        return Offers(threshold, wrapped(self._first), wrapped(self._tail), self._ring.copy())
