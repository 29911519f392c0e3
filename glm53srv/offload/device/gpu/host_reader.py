"""Small arrays on their way to the device without the copy engine, which may be busy for long.

Copies to the device are done one behind the other, whatever their streams: a few bytes enqueued behind a
staged layer's experts waited 20 ms for them on an H200. A kernel reads them from pinned memory at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

BLOCK = 1024
NUM_KEPT = 256
"""Arrays kept until their readers are done for certain: once per step the host waits for its logits, in front
of which the device has read all that earlier steps sent, and a step or a prefill's layer sends fewer than
five."""


@triton.jit(do_not_specialize=["num_words"])
def fetch_words(source, target, num_words, block: tl.constexpr):
    """Copy int32 words; see launch_fetch."""
    word = tl.program_id(0) * block + tl.arange(0, block)
    inside = word < num_words
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


def launch_fetch(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a contiguous array to another of its size, in stream order: whole words of 4 bytes.

    source: in pinned memory, unchanged until the kernel has run.
    """
    if source.nbytes != target.nbytes or source.nbytes % 4:
        raise ValueError(f"cannot fetch {source.nbytes} bytes into {target.nbytes}")
    words = source.view(-1).view(torch.int32)
    fetch_words[(triton.cdiv(len(words), BLOCK),)](
        words, target.view(-1).view(torch.int32), len(words), block=BLOCK
    )


class HostReader:
    """Puts arrays where kernels can read them. Engine thread only.

    num_kept: arrays that stay pinned; as many as may be sent between two waits for the device, and more.
    """

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[torch.Tensor] = deque(maxlen=num_kept)
        self._pins = torch.cuda.is_available()

    def pin(self, values: NDArray[Any]) -> torch.Tensor:
        """Give a copy in pinned memory, which kernels enqueued soon may read."""
        pinned = torch.from_numpy(np.ascontiguousarray(values))
        if self._pins:
            pinned = pinned.pin_memory()
        self._kept.append(pinned)
        return pinned

    def send(self, values: NDArray[Any], target: torch.Tensor) -> None:
        """Enqueue a copy of values into target, contiguous and of their size."""
        launch_fetch(self.pin(values), target)
