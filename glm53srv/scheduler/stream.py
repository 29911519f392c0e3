"""The reader's end of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from glm53srv.request import FinishReason, SequenceTimes, TokenEvent
from glm53srv.scheduler.sequence import Sequence


class TokenStream:
    """Carries the events of one sequence to one reader, on the event loop thread.

    The writer never waits: what a slow reader has not taken is kept, at most one event per token of its
    output, and comes as one batch. Exactly one event has `finish` set, and it is the last one; after it, and
    after close(), next_events() returns an empty tuple. Whoever holds a stream closes it in a `finally`.
    """

    def __init__(self, sequence: Sequence, end: Callable[[int, FinishReason], None]) -> None:
        """Make a stream. end: called once at most, when the reader ends the sequence before its time."""
        self._sequence = sequence
        self._end = end
        self._events: list[TokenEvent] = []
        self._is_ended = False  # the last event was pushed, or the reader closed
        self._wake: asyncio.Future[None] | None = None

    @property
    def sequence(self) -> Sequence:
        """The scheduler's record, to read: times, seed, token counts."""
        return self._sequence

    @property
    def prompt_tokens(self) -> int:
        return self._sequence.num_prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled so far, with the stop id; also those that the reader has not taken yet."""
        return len(self._sequence.output_ids)

    @property
    def cached_tokens(self) -> int:
        return self._sequence.num_cached_tokens

    @property
    def times(self) -> SequenceTimes:
        """When it was submitted, first ran, gave its first and its newest token."""
        sequence = self._sequence
        return SequenceTimes(
            sequence.submitted_s,
            sequence.first_scheduled_s,
            sequence.first_token_s,
            sequence.last_token_s,
            sequence.num_preemptions,
        )

    async def next_events(self) -> tuple[TokenEvent, ...]:
        """Wait for news and return all there is, oldest first; empty at the end. One reader at a time."""
        assert self._wake is None, "a stream has one reader"
        if not self._events and not self._is_ended:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        events, self._events = tuple(self._events), []
        return events

    def close(self) -> None:
        """End the sequence if it still runs, and drop what was not read. Idempotent, never waits."""
        self._events.clear()
        self._stop(FinishReason.ABORT)

    def finish(self) -> None:
        """End the sequence because its text reached a stop string.

        Tokens not read yet are dropped; one last event with FinishReason.STOP follows, unless the reader has
        taken the last event already. Does nothing after the end.
        """
        has_unread_end = bool(self._events) and self._events[-1].finish is not None
        if self._is_ended and not has_unread_end:
            return
        self._events = [TokenEvent(None, finish=FinishReason.STOP)]
        self._stop(FinishReason.STOP)

    def push(self, event: TokenEvent) -> None:
        """Add an event. Called by the step loop only."""
        assert not self._is_ended, "an event after the last one"
        self._events.append(event)
        self._is_ended = event.finish is not None
        self._notify()

    def _stop(self, finish: FinishReason) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._end(self._sequence.sequence_id, finish)
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
