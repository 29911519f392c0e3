"""What a prefill's staging needs of cache slots: in host memory (slots.py) or on a GPU (gpu/gpu_slots.py)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SlotMemory(Protocol):
    """Slots that copies fill. table: int32 (layers, experts), slot or -1, as the next step will read it."""

    table: NDArray[np.int32]

    def stage(self, keys: NDArray[np.int32], slots: NDArray[np.int32]) -> int:
        """Issue a prefill's copies into lent slots; gives a ticket for `wait`."""

    def wait(self, ticket: int) -> None:
        """Make whatever computes next come after everything of a ticket has landed."""

    def scribble(self, slots: NDArray[np.integer]) -> None:
        """Let slots hold what lent memory may: nothing."""
