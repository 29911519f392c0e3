"""Which slots are busy and where each stands: the part of the contract that every real engine checks.

slot    holds     between plans
----    -----     -------------
free    nothing
busy    state, num_computed, and a chunk while one is in flight (its activations between two layers)

free --first slice--> busy --release--> free           release in the middle of a chunk is as good as any
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from glm53srv.engine.base import DecodeRow, EngineLimits, PrefillSlice, StepPlan
from glm53srv.errors import EngineError

State = TypeVar("State")
"""An engine's recurrent state of one sequence."""
Chunk = TypeVar("Chunk")
"""An engine's activations of a chunk in flight."""


@dataclass(slots=True)
class Slot(Generic[State, Chunk]):
    """One sequence. in_flight: activations of the chunk under way, None between chunks; chunk: its tokens;
    next_layer: its next layer. num_computed: tokens whose state is complete in every layer. page_ids: of its
    last decode row, known to exist."""

    state: State
    num_computed: int = 0
    is_prefilled: bool = False
    in_flight: Chunk | None = None
    chunk: tuple[int, ...] = ()
    next_layer: int = 0
    page_ids: tuple[int, ...] = ()

    def pause(self, piece: PrefillSlice, in_flight: Chunk) -> None:
        """Keep a chunk's activations after the slice's last layer."""
        self.in_flight, self.chunk, self.next_layer = in_flight, piece.token_ids, piece.layer_end

    def finish(self, piece: PrefillSlice) -> None:
        """Note that the chunk left the last layer."""
        self.in_flight, self.chunk, self.next_layer = None, (), 0
        self.num_computed = piece.start_position + len(piece.token_ids)
        self.is_prefilled = piece.is_last_chunk


class SlotBook(Generic[State, Chunk]):
    """Owns the busy slots and checks plans against them. Used by the engine thread; raises EngineError."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.slots: dict[int, Slot[State, Chunk]] = {}

    @property
    def has_chunk(self) -> bool:
        """Some slot's chunk is between two layers."""
        return any(slot.chunk for slot in self.slots.values())

    def check_plan(self, plan: StepPlan) -> None:
        """Check what concerns the two parts of a step together."""
        if plan.prefill is not None:
            decoding = {row.slot for row in plan.decode}
            require(plan.prefill.slot not in decoding, "a slot prefills and decodes at once")

    def check_start(self, piece: PrefillSlice) -> None:
        """Check a first slice before its state is made."""
        require(0 <= piece.slot < self._limits.max_streams, f"slot {piece.slot} does not exist")
        require(piece.slot not in self.slots, f"slot {piece.slot} started without a release")

    def check_slice(self, piece: PrefillSlice) -> Slot[State, Chunk]:
        """Check a slice of a started slot; gives the slot."""
        limits, name = self._limits, f"slot {piece.slot}:"
        require(piece.slot in self.slots, f"slot {piece.slot} has no start")
        slot = self.slots[piece.slot]
        require(not slot.is_prefilled, f"{name} is prefilled already")
        require(
            piece.start_position == slot.num_computed,
            f"{name} chunk at {piece.start_position}, expected {slot.num_computed}",
        )
        require(
            0 < len(piece.token_ids) <= limits.max_chunk_tokens,
            f"{name} {len(piece.token_ids)} tokens in a chunk",
        )
        require(
            not slot.chunk or piece.token_ids == slot.chunk, f"{name} the chunk changed between its layers"
        )
        require(
            piece.layer_begin == slot.next_layer and piece.layer_begin < piece.layer_end <= limits.num_layers,
            f"{name} layers {piece.layer_begin} to {piece.layer_end}, expected to start at {slot.next_layer}",
        )
        others = [other for other, state in self.slots.items() if state.chunk and other != piece.slot]
        require(not others, f"{name} prefill inside a chunk of slot {others}")
        self._check_tokens(piece.token_ids, name)
        self._check_room(piece.page_ids, piece.start_position + len(piece.token_ids), name)
        self._check_page_ids(piece.page_ids, name)
        return slot

    def check_decode(self, rows: Sequence[DecodeRow]) -> list[Slot[State, Chunk]]:
        """Check the rows of a decode step; gives their slots in order."""
        require(len({row.slot for row in rows}) == len(rows), "a slot decodes twice in one step")
        found = []
        for row in rows:
            slot, name = self.slots.get(row.slot), f"slot {row.slot}:"
            require(slot is not None and slot.is_prefilled, f"{name} decode before the end of its prefill")
            assert slot is not None
            require(
                row.position == slot.num_computed,
                f"{name} position {row.position}, expected {slot.num_computed}",
            )
            self._check_tokens((row.token_id,), name)
            self._check_room(row.page_ids, row.position + 1, name)
            if row.page_ids != slot.page_ids:  # a device waits for us: hundreds of pages are looked at once
                self._check_page_ids(row.page_ids, name)
                slot.page_ids = row.page_ids
            found.append(slot)
        return found

    def _check_tokens(self, token_ids: Iterable[int], name: str) -> None:
        vocab_size = self._limits.vocab_size
        require(all(0 <= token < vocab_size for token in token_ids), f"{name} unknown token id")

    def _check_page_ids(self, page_ids: Sequence[int], name: str) -> None:
        num_pages = self._limits.num_pages
        require(all(0 <= page < num_pages for page in page_ids), f"{name} page id out of range")

    def _check_room(self, page_ids: Sequence[int], num_tokens: int, name: str) -> None:
        limits = self._limits
        require(num_tokens <= limits.max_context_tokens, f"{name} {num_tokens} tokens exceed the context")
        require(
            len(page_ids) * limits.page_tokens >= num_tokens, f"{name} too few pages for {num_tokens} tokens"
        )


def require(condition: bool, text: str) -> None:
    """Raise EngineError that says which rule of the contract a plan breaks."""
    if not condition:
        raise EngineError(f"the plan breaks the engine contract: {text}")
