"""Decides which tokens the next step computes. Pure: no clock, no thread, no engine; time is passed in.

One step is planned, executed, and applied before the next is planned. The rules of a plan:

1. Age is the order of submission. The queue is first in, first out; every admitted sequence is older than
   every queued one. A sequence is admitted when a slot is free and the pages for all its tokens are free and
   not yet promised to an admitted one; alone it is always admitted.
2. Every decoding sequence decodes one token in every step (but see 5).
3. At most one slice of one chunk joins. Prefilling sequences take turns chunk by chunk, in the order in which
   they were admitted or ended their last chunk, so that a short prompt waits for the chunk in progress of a
   long one, not for all its chunks. A chunk, once begun, goes through all layers before another one begins
   (the engine contract).
4. The slice has as many layers as fit into PLANNED_SHARE of token_interval_s minus the decode step, by
   measured costs, and at least one; where nothing decodes, as many as fit into idle_slice_s, which bounds how
   long an abort or a new request waits. The chunk's tokens do not depend on any of that.
5. Pages are taken when positions need them. A sequence that lacks pages takes them from the youngest
   admitted sequence, if that is younger than itself: that one is preempted, returns to the head of the queue,
   and later computes prompt and output again. Otherwise it pauses, and keeps what it has until an older one
   needs it. So the oldest always advances, and every request ends.
6. What ended since the last plan is released first; a slot is free for others from that plan on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from glm53srv.engine.base import EngineLimits, PrefillSlice, SampledToken, StepPlan, StepResult
from glm53srv.errors import QueueFull, RequestError
from glm53srv.request import FinishReason, GenerationRequest, TokenEvent
from glm53srv.scheduler.admission import check_request, context_tokens
from glm53srv.scheduler.cost import SMOOTHING, Rate, StepCosts
from glm53srv.scheduler.integrity import check_pages, check_sequences, check_slots, require
from glm53srv.scheduler.kv_pages import PagePool
from glm53srv.scheduler.plan import Chunk, InFlight, decode_row
from glm53srv.scheduler.sequence import Sequence, SequenceState
from glm53srv.scheduler.stats import SchedulerStats, Totals

MAX_RETRY_AFTER_S = 600

PLANNED_SHARE = 0.8
"""Share of the token interval that a plan fills. Costs are those of the chunk before, and latent layers take
up to a tenth more in each chunk; other programs take turns on the cores. Filled whole, the longest gap beside
a prompt of 4,096 tokens was 201 and 220 ms of 200 in the medians of two times five runs (random model, 2-core
EPYC VM, 2026-11)."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """max_queue: requests that may wait beyond those that run. The other two: rule 4 of the module."""

    max_queue: int = 64
    token_interval_s: float = 0.2
    idle_slice_s: float = 1.0


class Scheduler:
    """Owns queue, slots, pages and all live sequences. Used from one thread (the event loop's).

    Calls alternate: plan_step, then apply with its result; submit, abort and finish come at any time between.
    draw_seed: gives a fresh 64-bit seed for a request without one.
    """

    def __init__(
        self, limits: EngineLimits, settings: SchedulerSettings, draw_seed: Callable[[], int]
    ) -> None:
        self._limits = limits
        self._settings = settings
        self._draw_seed = draw_seed
        self._context_tokens = context_tokens(limits)
        self._pool = PagePool(limits.num_pages, limits.page_tokens)
        self._costs = StepCosts()
        self._next_sequence_id = 0
        self._next_step_id = 0
        self._sequences: dict[int, Sequence] = {}  # the live ones
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._admitted: list[Sequence] = []  # oldest first
        self._free_slots = set(range(limits.max_streams))
        self._ended_slots: set[int] = set()  # to be released in the next plan
        self._chunk: Chunk | None = None
        self._in_flight: InFlight | None = None
        self._totals = Totals()
        self._prefill_rate = Rate()
        self._output_rate = Rate()
        self._service_s: float | None = None  # smoothed time from admission to end

    # -- requests

    def submit(self, request: GenerationRequest, now_s: float) -> Sequence:
        """Queue a request and return its record, which the caller only reads.

        max_tokens is clamped to what is left of the context. Raises InvalidRequest for a token id that the
        model does not have, ContextLengthExceeded for a prompt that leaves no room for one token, QueueFull.
        """
        try:
            check_request(request, self._limits)
            if len(self._sequences) >= self._limits.max_streams + self._settings.max_queue:
                raise QueueFull(
                    f"{len(self._admitted)} requests run and {len(self._waiting)} wait; try again later",
                    retry_after_s=self._retry_after_s(now_s),
                )
        except RequestError:
            self._totals.rejected += 1
            raise
        room = self._context_tokens - len(request.prompt_ids)
        seed = request.sampling.seed
        sequence = Sequence(
            self._next_sequence_id,
            request,
            seed=(self._draw_seed() if seed is None else seed) % 2**64,
            eos_token_ids=self._limits.eos_token_ids,
            max_output_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            submitted_s=now_s,
        )
        self._next_sequence_id += 1
        self._sequences[sequence.sequence_id] = sequence
        self._waiting.append(sequence)
        self._totals.requests += 1
        return sequence

    def abort(self, sequence_id: int, now_s: float) -> bool:
        """End a sequence without a token; returns whether it was live. Its slot goes with the next plan."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, SequenceState.ABORTED, now_s)
        return sequence is not None

    def finish(self, sequence_id: int, now_s: float) -> bool:
        """End a sequence because its text reached a stop string; else like abort."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, SequenceState.FINISHED, now_s)
        return sequence is not None

    def _retry_after_s(self, now_s: float) -> int:
        """Estimate when a place becomes free: one stream's time from admission to end, over all streams."""
        service_s = self._service_s
        if service_s is None:  # nothing has ended yet: as long again as the oldest already runs
            starts = [sequence.first_scheduled_s for sequence in self._admitted]
            service_s = max((now_s - start for start in starts if start is not None), default=0.0)
        return min(max(math.ceil(service_s / self._limits.max_streams), 1), MAX_RETRY_AFTER_S)

    # -- planning

    def plan_step(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute or release."""
        assert self._in_flight is None, "the step before was not applied"
        released = self._take_ended_slots()
        self._admit(now_s)
        granted = self._grow_decoding()
        if self._chunk is None:
            self._chunk = self._begin_chunk()
        # A sequence that was granted its page may have lost it to the chunk of an older one.
        rows = tuple(sequence for sequence in granted if sequence.state is SequenceState.DECODING)
        released |= self._take_ended_slots()
        if not released and not rows and self._chunk is None:
            assert not self._sequences, "live sequences, but nothing to compute"
            return None
        plan = StepPlan(
            step_id=self._next_step_id,
            release=tuple(sorted(released)),
            prefill=None if self._chunk is None else self._slice(self._chunk, len(rows)),
            decode=tuple(decode_row(sequence) for sequence in rows),
        )
        self._next_step_id += 1
        self._in_flight = InFlight(plan, rows, self._chunk)
        return plan

    def _take_ended_slots(self) -> set[int]:
        ended, self._ended_slots = self._ended_slots, set()
        self._free_slots |= ended
        return ended

    def _grow_decoding(self) -> list[Sequence]:
        """Give decoding sequences, oldest first, the page of their next token; returns those that have it."""
        return [
            sequence
            for sequence in tuple(self._admitted)
            # Asked at its turn: an older one may have preempted it.
            if sequence.state is SequenceState.DECODING and self._grow(sequence, sequence.num_tokens)
        ]

    def _admit(self, now_s: float) -> None:
        while self._waiting and self._free_slots and self._has_room_for(self._waiting[0]):
            sequence = self._waiting.popleft()
            slot = min(self._free_slots)
            self._free_slots.remove(slot)
            sequence.admit(slot, self._next_step_id, now_s)
            self._admitted.append(sequence)

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Tell whether its tokens, and one more, fit beside what is promised to the admitted ones."""
        if not self._admitted:
            return True
        promised = sum(max(self._missing_pages(other, other.num_tokens + 1), 0) for other in self._admitted)
        return promised + self._missing_pages(sequence, sequence.num_tokens + 1) <= self._pool.num_free

    def _missing_pages(self, sequence: Sequence, num_tokens: int) -> int:
        return self._pool.pages_for(num_tokens) - len(sequence.page_ids)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give an admitted sequence the pages for num_tokens tokens, if need be those of younger ones."""
        missing = self._missing_pages(sequence, num_tokens)
        if missing <= 0:
            return True
        younger = self._admitted[self._admitted.index(sequence) + 1 :]
        if missing > self._pool.num_free + sum(len(other.page_ids) for other in younger):
            return False
        while missing > self._pool.num_free:
            self._preempt(self._admitted[-1])
        sequence.add_pages(self._pool.take(sequence.sequence_id, missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._detach(sequence)
        sequence.preempt()
        self._waiting.appendleft(sequence)
        self._totals.preemptions += 1

    def _begin_chunk(self) -> Chunk | None:
        """Begin the next chunk in turn among the sequences that can get its pages."""
        prefilling = [other for other in self._admitted if other.state is SequenceState.PREFILLING]
        for sequence in sorted(prefilling, key=lambda other: (other.turn, other.sequence_id)):
            end = sequence.chunk_end(self._limits.max_chunk_tokens)
            if self._grow(sequence, end):
                return Chunk(sequence, sequence.num_computed_tokens, end)
        return None

    def _slice(self, chunk: Chunk, num_rows: int) -> PrefillSlice:
        """Give as many layers of the chunk as rule 4 allows beside num_rows decode rows."""
        if num_rows > 0:
            budget_s = PLANNED_SHARE * self._settings.token_interval_s - self._costs.decode_s(num_rows)
        else:
            budget_s = self._settings.idle_slice_s
        layers_left = range(chunk.next_layer, self._limits.num_layers)
        num_layers = self._costs.layers_within(
            budget_s, chunk.num_tokens, layers_left, is_watched=num_rows > 0
        )
        return chunk.next_slice(num_layers)

    # -- results

    def apply(self, result: StepResult, now_s: float) -> list[tuple[int, TokenEvent]]:
        """Take in the result of the plan in flight; returns (sequence id, event) for each piece of news.

        A token for a sequence that ended meanwhile is dropped. Raises EngineError when the result does not
        answer the plan.
        """
        flight = self._in_flight
        assert flight is not None, "no step is in flight"
        flight.check_answer(result, self._limits.num_layers)
        self._in_flight = None
        self._totals.steps += 1
        self._learn(flight, result)
        events: list[tuple[int, TokenEvent]] = []
        for sequence, token in zip(flight.rows, result.tokens, strict=False):
            if sequence.is_live:
                sequence.num_computed_tokens += 1
                events.append(self._add_token(sequence, token, now_s))
        if flight.chunk is not None and flight.chunk.sequence.is_live:
            events += self._advance_chunk(flight, result, now_s)
        num_tokens = sum(event.token_id is not None for _, event in events)
        self._output_rate.add(num_tokens, now_s)
        self._totals.output_tokens += num_tokens
        return events

    def _learn(self, flight: InFlight, result: StepResult) -> None:
        piece = flight.plan.prefill
        if piece is not None:
            layers, stats = range(piece.layer_begin, piece.layer_end), result.stats
            self._costs.observe_prefill(len(piece.token_ids), layers, stats.prefill_s, stats.layers_s)
        if flight.rows:
            self._costs.observe_decode(len(flight.rows), result.stats.decode_s)

    def _advance_chunk(
        self, flight: InFlight, result: StepResult, now_s: float
    ) -> list[tuple[int, TokenEvent]]:
        chunk, piece = flight.chunk, flight.plan.prefill
        assert chunk is not None
        assert piece is not None
        chunk.next_layer = piece.layer_end
        if not result.prefill_done:
            return []
        sequence = chunk.sequence
        self._chunk = None
        sequence.num_computed_tokens = chunk.end
        sequence.turn = self._next_step_id + 1  # behind whom the next plan admits: they came meanwhile
        self._prefill_rate.add(chunk.num_tokens, now_s)
        self._totals.prefill_tokens += chunk.num_tokens
        news = sequence.prompt_news(result.prompt_logprobs, now_s)
        events = [] if news is None else [(sequence.sequence_id, TokenEvent(None, prompt=news))]
        if piece.is_last_chunk:
            sequence.begin_decoding()
            events.append(self._add_token(sequence, result.tokens[-1], now_s))
        return events

    def _add_token(self, sequence: Sequence, token: SampledToken, now_s: float) -> tuple[int, TokenEvent]:
        if sequence.max_output_tokens == 0:  # the prompt was all that was wanted
            self._end(sequence, SequenceState.FINISHED, now_s)
            return sequence.sequence_id, TokenEvent(None, finish=FinishReason.LENGTH)
        if token.error is not None:  # this sequence alone cannot go on
            self._end(sequence, SequenceState.ABORTED, now_s)
            return sequence.sequence_id, TokenEvent(None, finish=FinishReason.ERROR, error=token.error)
        finish, is_stop_token = sequence.add_token(token.token_id, now_s)
        if finish is not None:
            self._end(sequence, SequenceState.FINISHED, now_s)
        return sequence.sequence_id, TokenEvent(token.token_id, token.logprobs, is_stop_token, finish)

    def _end(self, sequence: Sequence, state: SequenceState, now_s: float) -> None:
        if sequence.state is SequenceState.QUEUED:
            self._waiting.remove(sequence)
        else:
            self._detach(sequence)
        if sequence.first_scheduled_s is not None:
            service_s = now_s - sequence.first_scheduled_s
            known_s = service_s if self._service_s is None else self._service_s
            self._service_s = known_s + SMOOTHING * (service_s - known_s)
        sequence.end(state)
        del self._sequences[sequence.sequence_id]
        if state is SequenceState.FINISHED:
            self._totals.finished += 1
        else:
            self._totals.aborted += 1

    def _detach(self, sequence: Sequence) -> None:
        """Take slot, pages and chunk from an admitted sequence."""
        assert sequence.slot is not None
        self._admitted.remove(sequence)
        self._ended_slots.add(sequence.slot)
        self._pool.give_back(sequence.sequence_id, sequence.drop_cache())
        if self._chunk is not None and self._chunk.sequence is sequence:
            self._chunk = None

    # -- inspection

    @property
    def num_live(self) -> int:
        """Count the sequences that have not ended."""
        return len(self._sequences)

    def stats(self, now_s: float) -> SchedulerStats:
        """Take a snapshot."""
        totals = self._totals
        return SchedulerStats(
            num_running=len(self._admitted),
            num_waiting=len(self._waiting),
            max_streams=self._limits.max_streams,
            max_queue=self._settings.max_queue,
            num_pages_used=self._pool.num_pages - self._pool.num_free,
            num_pages=self._pool.num_pages,
            prefill_tokens_per_s=self._prefill_rate.per_second(now_s),
            output_tokens_per_s=self._output_rate.per_second(now_s),
            total_requests=totals.requests,
            total_finished=totals.finished,
            total_aborted=totals.aborted,
            total_rejected=totals.rejected,
            total_preemptions=totals.preemptions,
            total_steps=totals.steps,
            total_prefill_tokens=totals.prefill_tokens,
            total_output_tokens=totals.output_tokens,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError with a reason if an invariant is broken."""
        in_flight = frozenset() if self._in_flight is None else self._in_flight.slots
        check_sequences(self._waiting, self._admitted, self._limits)
        check_slots(self._admitted, self._free_slots, self._ended_slots, in_flight, self._limits)
        check_pages(self._pool, self._admitted)
        live = {sequence.sequence_id: sequence for sequence in (*self._admitted, *self._waiting)}
        require(live == self._sequences, "the live sequences are not the admitted and the waiting ones")
        if self._chunk is not None:
            chunk, sequence = self._chunk, self._chunk.sequence
            require(
                sequence.state is SequenceState.PREFILLING, f"a chunk of a sequence that is {sequence.state}"
            )
            require(chunk.begin == sequence.num_computed_tokens, "the chunk is not the next one")
            require(0 <= chunk.next_layer < self._limits.num_layers, f"chunk at layer {chunk.next_layer}")
            require(self._missing_pages(sequence, chunk.end) <= 0, "the chunk has too few pages")
