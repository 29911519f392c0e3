"""What a slice of a prompt gave, and the time of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a slice gave. is_done: its chunk left the last layer. last_row: float32 (1, vocabulary), of a last
    chunk. error: in its place, why there is none. layers_s: seconds of each layer."""

    is_done: bool = False
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    last_row: NDArray[np.float32] | None = None
    error: str | None = None
    layers_s: tuple[float, ...] = ()


def with_tail(layers_s: tuple[float, ...], total_s: float) -> tuple[float, ...]:
    """Give what a slice took beyond its layers' own seconds to the last of them: its kernels ran longest."""
    if not layers_s:
        return ()
    return (*layers_s[:-1], max(layers_s[-1], total_s - sum(layers_s[:-1])))
