"""Drives an engine step by step, without a scheduler: whole prompts, and decode steps of given slots.

A decode step takes drawn tokens and not those that were sampled: random weights answer in loops, and the
experts of a loop would all be in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from glm53srv.engine.base import DecodeRow, Engine, PrefillSlice, SequenceStart, StepPlan, StepResult
from glm53srv.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
HIGHEST_TOKEN = 150_000
"""Ids below are text in the published vocabulary."""
DRAWN_AT_ONCE = 1024
"""Tokens for decode steps."""


class Routes(Protocol):
    """What prescribes the experts of decode steps."""

    def send(self, streams: Sequence[int]) -> None:
        """Prescribe those of the next step, whose rows are these streams'."""


class Driver:
    """Owns an engine's plans and slots; tokens are drawn, pages shared out evenly. Engine thread only."""

    def __init__(self, engine: Engine, seed: int = 0, routes: Routes | None = None) -> None:
        """routes: told before each decode step which slots it has, see engine/cuda/imposed_routes.py."""
        limits = engine.limits
        self.engine = engine
        self._routes = routes
        self.depth = limits.num_layers
        self._step = 0
        self._rng = np.random.default_rng(seed)
        self._positions: dict[int, int] = {}
        self._share = limits.num_pages // limits.max_streams
        self._most_tokens = min(HIGHEST_TOKEN, limits.vocab_size)
        # Made before they are wanted: between two steps the device waits.
        self._pages = [self._pages_of(slot) for slot in range(limits.max_streams)]
        self._drawn: list[int] = []

    def pieces(self, slot: int, num_tokens: int, layers: int | None = None) -> list[PrefillSlice]:
        """Cut a prompt of drawn tokens into slices: whole chunks, or `layers` layers at a time."""
        ids, chunk = self._draw(num_tokens), self.engine.limits.max_chunk_tokens
        stride = layers or self.depth
        self._positions[slot] = num_tokens
        return [
            PrefillSlice(
                slot,
                ids[begin : begin + chunk],
                begin,
                self._pages[slot],
                first,
                min(self.depth, first + stride),
                begin + chunk >= num_tokens,
                SequenceStart(f"s{slot}", GREEDY, 0, ids) if begin == first == 0 else None,
            )
            for begin in range(0, num_tokens, chunk)
            for first in range(0, self.depth, stride)
        ]

    def step(
        self, prefill: PrefillSlice | None = None, decode: Sequence[int] = (), release: Sequence[int] = ()
    ) -> StepResult:
        """Run one step; decode names slots, each of which takes a drawn token."""
        self._step += 1
        if decode and self._routes is not None:
            self._routes.send(decode)
        return self.engine.step(
            StepPlan(self._step, prefill=prefill, decode=self._rows(decode), release=tuple(release))
        )

    def time_step(self, prefill: PrefillSlice | None = None, decode: Sequence[int] = ()) -> float:
        """Run one step; gives its seconds."""
        begin = time.perf_counter()
        self.step(prefill, decode)
        return time.perf_counter() - begin

    def prefill_s(self, slot: int, num_tokens: int) -> float:
        """Time a prompt from its first slice to its first token."""
        pieces = self.pieces(slot, num_tokens)
        return sum(self.time_step(piece) for piece in pieces)

    def _rows(self, slots: Sequence[int]) -> tuple[DecodeRow, ...]:
        rows = []
        for slot in slots:
            if not self._drawn:
                self._drawn = list(self._draw(DRAWN_AT_ONCE))
            rows.append(DecodeRow(slot, self._drawn.pop(), self._positions[slot], self._pages[slot]))
            self._positions[slot] += 1
        return tuple(rows)

    def _draw(self, count: int) -> tuple[int, ...]:
        drawn: list[int] = self._rng.integers(0, self._most_tokens, count).tolist()
        return tuple(drawn)

    def _pages_of(self, slot: int) -> tuple[int, ...]:
        # As a scheduler's, which takes the lowest: few pages in use are low ones.
        streams = self.engine.limits.max_streams
        return tuple(range(slot, self._share * streams, streams))


class TimedModel:
    """A CudaModel that notes how long the host takes to enqueue a decode step: the floor of a step's time.

    behind: called when a step is enqueued, and not timed, for what prepares the next one.
    """

    def __init__(self, model: Any, behind: Callable[[], None] | None = None) -> None:
        self._model = model
        self._behind = behind
        self.enqueue_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def inner(self) -> Any:
        """The model whose steps are timed."""
        return self._model

    def decode(self, *arguments: Any) -> Any:
        """Enqueue a step, and note the time."""
        begin = time.perf_counter()
        logits = self._model.decode(*arguments)
        self.enqueue_s.append(time.perf_counter() - begin)
        if self._behind is not None:
            self._behind()
        return logits
