"""A step in the making and in flight: what ties the engine's plan to the scheduler's sequences."""

from __future__ import annotations

from dataclasses import dataclass

from glm53srv.engine.base import DecodeRow, PrefillSlice, StepPlan, StepResult
from glm53srv.errors import EngineError
from glm53srv.scheduler.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """The chunk in progress: positions [begin, end) of a prefilling sequence, layers [0, next_layer) done."""

    sequence: Sequence
    begin: int
    end: int
    next_layer: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    def next_slice(self, num_layers: int) -> PrefillSlice:
        """Give the next num_layers layers as the engine wants them."""
        sequence = self.sequence
        assert sequence.slot is not None
        is_first = self.begin == 0 and self.next_layer == 0
        return PrefillSlice(
            slot=sequence.slot,
            token_ids=sequence.tokens_between(self.begin, self.end),
            start_position=self.begin,
            page_ids=sequence.page_ids,
            layer_begin=self.next_layer,
            layer_end=self.next_layer + num_layers,
            is_last_chunk=self.end == sequence.num_tokens,
            start=sequence.start() if is_first else None,
        )


@dataclass(frozen=True, slots=True)
class InFlight:
    """The step that the engine executes. rows: its decoding sequences in plan order; chunk: its prefill's."""

    plan: StepPlan
    rows: tuple[Sequence, ...]
    chunk: Chunk | None

    @property
    def slots(self) -> frozenset[int]:
        """The slots that the step computes in."""
        prefill = self.plan.prefill
        return frozenset(row.slot for row in self.plan.decode) | (
            frozenset() if prefill is None else {prefill.slot}
        )

    def check_answer(self, result: StepResult, num_layers: int) -> None:
        """Raise EngineError unless the result has the shape that the plan asks for."""
        plan, piece = self.plan, self.plan.prefill
        is_done = piece is not None and piece.layer_end == num_layers
        slots = [row.slot for row in plan.decode]
        if piece is not None and is_done and piece.is_last_chunk:
            slots.append(piece.slot)
        answered = [token.slot for token in result.tokens]
        num_judged = 0
        if self.chunk is not None and is_done:
            num_judged = len(self.chunk.sequence.prompt_positions(self.chunk.begin, self.chunk.end))
        if len(result.prompt_logprobs) != num_judged:
            raise EngineError(
                f"the engine gave log probabilities of {len(result.prompt_logprobs)} prompt tokens in step "
                f"{plan.step_id}, which wants {num_judged}"
            )
        if result.step_id != plan.step_id or result.prefill_done != is_done or answered != slots:
            raise EngineError(
                f"the engine answered step {result.step_id} with tokens for slots {answered} and "
                f"prefill_done {result.prefill_done}; step {plan.step_id} wants slots {slots} and {is_done}"
            )


def decode_row(sequence: Sequence) -> DecodeRow:
    """Give a decoding sequence's next token as the engine wants it."""
    assert sequence.slot is not None
    position = sequence.num_computed_tokens
    return DecodeRow(sequence.slot, sequence.last_token_id, position, sequence.page_ids)
