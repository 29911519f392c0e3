"""A decode step's logits on their way to the host, in front of everything else that follows the step.

Copied to memory that is not pinned they arrive twice: the driver stages them, and each of a fresh block's
pages is first touched, which on an H200's host cost 80 us a step for one row of 620 kB (2026-11-30). And a
host that waits for an event waits for the logits alone, not for the log's copies and the table's changes
behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SentLogits:
    """Logits under way. rows: float32 (rows, vocabulary), complete once `arrived` has passed, None without a
    device; overwritten by the next step's."""

    rows: NDArray[np.float32]
    arrived: Any

    def wait(self) -> NDArray[np.float32]:
        """Wait for them, and give them until the next step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.rows


class HostLogits:
    """Owns the pinned rows, which grow with the widest step so far. Engine thread only."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: columns that are sent; what a head has beyond is padding."""
        self._vocab_size = vocab_size
        self._has_device = torch.cuda.is_available()
        self._rows = torch.empty((0, vocab_size), dtype=torch.float32)
        self._arrived = torch.cuda.Event() if self._has_device else None

    def send(self, logits: torch.Tensor) -> SentLogits:
        """Enqueue the conversion and the copy of logits (rows, padded vocabulary) of any float type.

        The rows sent before must have been waited for.
        """
        count = len(logits)
        if count > len(self._rows):
            shape = (count, self._vocab_size)
            self._rows = torch.empty(shape, dtype=torch.float32, pin_memory=self._has_device)
        target = self._rows[:count]
        target.copy_(logits[:, : self._vocab_size].float(), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return SentLogits(target.numpy(), self._arrived)
