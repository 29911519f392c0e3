"""CLOCK over cache slots, with a choice by heat among those that its hand would take next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Clock:
    """Owns reference bits and hand. Used by residency.ResidencyPolicy alone.

    window: how many slots per victim the hand offers, of which the coldest goes; 1 is plain CLOCK.
    """

    def __init__(self, num_slots: int, window: int) -> None:
        self._referenced = np.zeros(num_slots, bool)
        self._window = window
        self._hand = 0

    def touch(self, slots: NDArray[np.integer]) -> None:
        """Mark slots as used: one turn of the hand to prove themselves."""
        self._referenced[slots] = True

    def sweep(self, num_victims: int, is_evictable: NDArray[np.bool_], heat: NDArray[np.float32]) -> Ints:
        """Move the hand past num_victims unreferenced slots; return the coldest ahead of it.

        is_evictable: bool (capacity,), slots that may go. heat: float32 (capacity,), of what they hold. Gives
        int32 (<= num_victims,), coldest first. A reference bit that the hand passes is cleared. When one turn
        finds too few, the second turn takes referenced slots too.
        """
        capacity = len(is_evictable)
        ring = (self._hand + np.arange(capacity, dtype=np.int32)) % max(1, capacity)
        evictable = is_evictable[ring]
        offered = np.flatnonzero(evictable & ~self._referenced[ring])
        if len(offered) < num_victims:
            self._referenced[:capacity] = False
            offered = np.flatnonzero(evictable)
        if not len(offered):
            return np.empty(0, np.int32)
        end = int(offered[min(num_victims, len(offered)) - 1])
        self._referenced[ring[: end + 1]] = False
        self._hand = int(ring[end] + 1) % capacity
        near = ring[offered[: num_victims * self._window]]
        return near[np.argsort(heat[near], kind="stable")[:num_victims]]
