"""What residency tells a device to change between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.offers import ABSENT, BARRED, Offers

Ints = NDArray[np.int32]


def _no_keys() -> Ints:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ResidencyUpdate:
    """What the mechanism does between two steps, in this order; all arrays int32.

    unmap_keys: table entries to clear before the next step. map_keys, map_slots: entries to set before the
    next step. copy_keys, copy_slots: copies to start now, in order; nothing maps their slots. num_admitted:
    admissions decided now, whose copies start now (free slots) or with the next update (victims); they are
    what the copy budget pays for. bar_keys: entries that may not take an offer, behind the unmapping and
    before the mapping: see change(). offers: what the next step may take, None where there are none.
    offered_slots: those that it may take and the running step may not.
    """

    unmap_keys: Ints
    map_keys: Ints
    map_slots: Ints
    copy_keys: Ints
    copy_slots: Ints
    num_admitted: int = 0
    bar_keys: Ints = field(default_factory=_no_keys)
    offers: Offers | None = None
    offered_slots: Ints = field(default_factory=_no_keys)

    def change(self, entries: Ints) -> None:
        """Change a residency table in place, int32 (num_keys,), as a device must, behind the running step.

        An expert that the running step has just kept has its slot there: it cannot be barred any more.
        """
        entries[self.unmap_keys] = ABSENT
        barred = self.bar_keys[entries[self.bar_keys] == ABSENT]
        entries[barred] = BARRED
        entries[self.map_keys] = self.map_slots
