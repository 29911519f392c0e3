"""Staging of a prefill chunk: layer l + 1's experts travel while layer l computes, through two buffers.

A buffer's life, per chunk; layer number i of the chunk's sparse layers uses buffer i % 2:

    state      event                                         next
    EMPTY      start (layers 0, 1), or end of layer i - 2    COPYING   its copies are issued
    COPYING    the copies landed                             READY
    READY      layer i begins                                IN_USE
    IN_USE     layer i ends                                  EMPTY     then at once COPYING for layer i + 2
    any        the chunk is aborted                          EMPTY     copies still under way are waited for

       buffer A   |copy 0|=compute 0=|copy 2    |=compute 2=|
       buffer B          |copy 1     |=compute 1=|copy 3    |

A prefill that pauses between layers keeps both buffers. An expert that was resident when its layer was
staged may be evicted by decode steps before the layer runs: so a layer looks up its slot in the table when
it runs, and reads in place what it finds neither there nor in its buffer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BUFFERS = 2

STAGE_MIN_PICKS = 4096
"""Picks per layer from which staging pays: 512 tokens of top 8.

Reading in place costs the distinct experts, about 226 of 288 at that size in synthetic routes, at 0.40 ms
each; a staged layer costs all that are not resident, about 255, at 0.378 ms, but overlapped with the layer
before. Below, reads in place move fewer bytes (RTX 3090 figures of 0xSero/glm53-flash-offload).
"""


class BufferState(enum.Enum):
    """State of a staging buffer; see the head of the file."""

    EMPTY = "empty"
    COPYING = "copying"
    READY = "ready"
    IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class StageCopy:
    """Issue the copies of this sparse layer into this buffer."""

    layer: int
    buffer: int


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """Which experts of a layer go into a buffer. keys, slots: int32, same length, in copy order."""

    keys: NDArray[np.int32]
    slots: NDArray[np.int32]


def should_stage(num_tokens: int, top_k: int, min_picks: int = STAGE_MIN_PICKS) -> bool:
    """Tell whether a chunk has enough picks per layer for staging to pay."""
    return num_tokens * top_k >= min_picks


def stage_layer(
    layer: int, table_row: NDArray[np.int32], heat_row: NDArray[np.int32], first_slot: int, num_slots: int
) -> StagedLayer:
    """Choose what a buffer of slots [first_slot, first_slot + num_slots) receives for a layer.

    table_row, heat_row: int32 (experts,), the layer's row of the residency and heat tables. All experts
    that are not resident, the hottest (the lower number among equals) as far as the buffer goes; the rest is
    read in place. In ascending order, so that neighbours at home are neighbours in the buffer and travel as
    one copy.
    """
    missing = np.flatnonzero(table_row < 0).astype(np.int32)
    order = np.argsort(-heat_row[missing].astype(np.int64), kind="stable")[:num_slots]
    experts = np.sort(missing[order])
    slots = np.arange(first_slot, first_slot + len(experts), dtype=np.int32)
    return StagedLayer(experts + np.int32(layer * len(table_row)), slots)


class StagingSchedule:
    """Orders copies and layers of one chunk. Called by the engine thread; raises ValueError out of order."""

    def __init__(self, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError("a chunk has at least one sparse layer")
        self.num_layers = num_layers
        self.next_layer = 0
        self._state = [BufferState.EMPTY] * NUM_BUFFERS
        self._layer: list[int | None] = [None] * NUM_BUFFERS

    def state(self, buffer: int) -> tuple[BufferState, int | None]:
        """State of a buffer and the layer it belongs to."""
        return self._state[buffer], self._layer[buffer]

    @property
    def is_done(self) -> bool:
        """Every layer has run, or the chunk was aborted."""
        return self.next_layer >= self.num_layers

    def start(self) -> tuple[StageCopy, ...]:
        """Begin the chunk: the copies to issue before its first layer."""
        if self.next_layer or any(state is not BufferState.EMPTY for state in self._state):
            raise ValueError("the chunk has begun already")
        return tuple(self._assign(layer) for layer in range(min(NUM_BUFFERS, self.num_layers)))

    def landed(self, layer: int) -> None:
        """Note that all copies of a layer have arrived."""
        self._expect(layer, BufferState.COPYING)
        self._state[layer % NUM_BUFFERS] = BufferState.READY

    def begin_layer(self, layer: int) -> None:
        """Run a layer; its copies must have landed, and the layer before must have ended."""
        if layer != self.next_layer:
            raise ValueError(f"layer {layer} begins, {self.next_layer} is next")
        self._expect(layer, BufferState.READY)
        self._state[layer % NUM_BUFFERS] = BufferState.IN_USE

    def end_layer(self, layer: int) -> tuple[StageCopy, ...]:
        """Free the layer's buffer; return the copies to issue into it."""
        self._expect(layer, BufferState.IN_USE)
        self._state[layer % NUM_BUFFERS], self._layer[layer % NUM_BUFFERS] = BufferState.EMPTY, None
        self.next_layer = layer + 1
        following = layer + NUM_BUFFERS
        return (self._assign(following),) if following < self.num_layers else ()

    def abort(self) -> tuple[int, ...]:
        """Give the chunk up; return the layers whose copies must land before the buffers are lent on."""
        pending = tuple(
            layer
            for layer, state in zip(self._layer, self._state, strict=True)
            if state is BufferState.COPYING and layer is not None
        )
        self._state = [BufferState.EMPTY] * NUM_BUFFERS
        self._layer = [None] * NUM_BUFFERS
        self.next_layer = self.num_layers
        return pending

    def _assign(self, layer: int) -> StageCopy:
        buffer = layer % NUM_BUFFERS
        self._state[buffer], self._layer[buffer] = BufferState.COPYING, layer
        return StageCopy(layer, buffer)

    def _expect(self, layer: int, state: BufferState) -> None:
        found, owner = self.state(layer % NUM_BUFFERS)
        if owner != layer or found is not state:
            raise ValueError(
                f"layer {layer} is not {state.value}: its buffer is {found.value} for layer {owner}"
            )
