"""One choice without a protocol: prompt ids in, parsed steps out.

    TokenStream -> detokenizer -> stop strings -> output parser -> StepOutput

Every endpoint uses this path; each protocol only builds jobs and spells outputs. generations.py runs all
choices of a request. Event loop only. Stop strings see the whole output, reasoning and markers included, and
nothing of the first min_tokens tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from glm53srv.api.detokenizer import Detokenizer
from glm53srv.api.markers import Piece
from glm53srv.api.output_events import CallEnd, OutputEvent, merge_events
from glm53srv.api.stop_strings import StopStrings
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.errors import NotReady, RequestFailed
from glm53srv.request import (
    FinishReason,
    GenerationRequest,
    PromptNews,
    SequenceTimes,
    TokenEvent,
    Usage,
)

RETRY_AFTER_S = 10


class TokenSource(Protocol):
    """The reader's end of one sequence (scheduler.stream.TokenStream)."""

    @property
    def cached_tokens(self) -> int: ...

    @property
    def times(self) -> SequenceTimes: ...

    async def next_events(self) -> tuple[TokenEvent, ...]:
        """Wait for news and give all there is; empty after the end."""

    def close(self) -> None:
        """Abort, if it still runs. Idempotent."""

    def finish(self) -> None:
        """End the sequence as stopped."""


class OutputReader(Protocol):
    """Makes events of decoded output (output_parser.OutputParser)."""

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def has_open_call(self) -> bool: ...

    @property
    def num_complete_calls(self) -> int: ...

    def push(self, pieces: Iterable[Piece]) -> list[OutputEvent]:
        """Take output, give what is certain."""

    def finish(self, *, closes_calls: bool = False) -> list[OutputEvent]:
        """End the output."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One prompt to answer num_choices times.

    new_reader: makes the parser of one choice, in the state in which the prompt ends. stop: stop strings.
    max_calls: end after so many complete tool calls. Choice i > 0 draws from seed + i. skip_special_tokens:
    leave special tokens out of the text. requests: one for each choice, made with the job and so not on the
    event loop when the prompt is long.
    """

    request: GenerationRequest
    new_reader: Callable[[], OutputReader]
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    max_calls: int | None = None
    num_choices: int = 1
    skip_special_tokens: bool = True
    requests: tuple[GenerationRequest, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        requests = tuple(_request_of_choice(self.request, choice) for choice in range(self.num_choices))
        object.__setattr__(self, "requests", requests)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. matched: the stop string or stop id that ended it, if one did.

    abort: another request asked for its end.
    """

    reason: Literal["stop", "length", "tool_calls", "abort"]
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of an ended choice: waiting, computing the prompt, sampling after the first token, and all."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one or several steps gave for one choice.

    tokens: the sampled tokens that belong to the text, for log probabilities and token counts. end_token: the
    stop id, which belongs to no text. prompt: news of the prompt, which come before everything else. usage:
    the choice's counts so far. timings: set with finish.
    """

    choice: int
    events: Sequence[OutputEvent]
    tokens: Sequence[TokenEvent]
    finish: Finish | None = None
    end_token: TokenEvent | None = None
    prompt: Sequence[PromptNews] = ()
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    timings: Timings | None = None


class Generation:
    """One choice in progress. Whoever opens it closes it in a `finally`."""

    def __init__(
        self,
        choice: int,
        source: TokenSource,
        job: GenerationJob,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._source = source
        self._job = job
        self._clock = clock
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=job.skip_special_tokens)
        self._stops = StopStrings(job.stop, include_match=job.include_stop)
        self._reader = job.new_reader()
        self._calls_end_id = tokenizer.control_id("<|observation|>")
        self._num_tokens = 0
        self._num_reasoning = 0
        self._num_calls = 0
        self._untold: list[TokenEvent] = []  # tokens whose text is still held; they go with the next output
        self.is_finished = False

    @property
    def usage(self) -> Usage:
        """Counts of what was read so far."""
        return Usage(
            prompt_tokens=len(self._job.request.prompt_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=self._source.cached_tokens,
            reasoning_tokens=self._num_reasoning,
        )

    @property
    def is_scheduled(self) -> bool:
        """It has left the queue."""
        return self._source.times.first_scheduled_s is not None

    async def next_step(self) -> StepOutput:
        """Wait until there is something to deliver. Not to be called after the finish.

        Raises RequestFailed when the engine failed, NotReady when the server ended the sequence.
        """
        while True:
            output = self._read(await self._source.next_events())
            has_news = output.events or output.finish is not None or output.prompt
            if has_news or any(token.logprobs for token in output.tokens):
                return output
            self._untold += output.tokens

    def close(self) -> None:
        """Abort, if it still runs. Idempotent."""
        self._source.close()

    def _read(self, news: tuple[TokenEvent, ...]) -> StepOutput:
        if not news:
            raise NotReady("the request was ended", retry_after_s=RETRY_AFTER_S)
        events: list[OutputEvent] = []
        tokens, self._untold = self._untold, []
        prompt = [event.prompt for event in news if event.prompt is not None]
        for event in news:
            if event.token_id is not None:
                self._count()
                if not event.is_stop_token:
                    tokens.append(event)
                    events += self._take(event.token_id)
            finish = self._finish_of(event)
            if finish is not None:
                events += self._flush(event)
                self.is_finished = True
                return StepOutput(
                    self._choice,
                    merge_events(events),
                    tokens,
                    finish=self._reason(finish),
                    end_token=event if event.is_stop_token else None,
                    prompt=prompt,
                    usage=self.usage,
                    timings=self._timings(),
                )
        return StepOutput(self._choice, merge_events(events), tokens, prompt=prompt, usage=self.usage)

    def _timings(self) -> Timings:
        """Split the time from submission to now."""
        times, now_s = self._source.times, self._clock()
        scheduled_s = now_s if times.first_scheduled_s is None else times.first_scheduled_s
        first_s = now_s if times.first_token_s is None else times.first_token_s
        last_s = first_s if times.last_token_s is None else times.last_token_s
        return Timings(
            queue_s=scheduled_s - times.submitted_s,
            prefill_s=first_s - scheduled_s,
            decode_s=last_s - first_s,
            total_s=now_s - times.submitted_s,
            num_preemptions=times.num_preemptions,
        )

    def _count(self) -> None:
        self._num_tokens += 1
        self._num_reasoning += self._reader.in_reasoning

    def _take(self, token_id: int) -> list[OutputEvent]:
        pieces = self._detokenizer.push(token_id)
        if self._num_tokens > self._job.request.sampling.min_tokens:
            pieces = self._stops.push(pieces)
        events = self._reader.push(pieces)
        self._num_calls += sum(isinstance(event, CallEnd) for event in events)
        return events

    def _finish_of(self, event: TokenEvent) -> Finish | None:
        """Tell whether the output ends here; ends the sequence if it is the text that ends it."""
        max_calls = self._job.max_calls
        if self._stops.matched is not None:
            self._source.finish()
            return Finish("stop", self._stops.matched)
        if max_calls is not None and self._num_calls >= max_calls:
            self._source.finish()
            return Finish("stop")
        match event.finish:
            case None:
                return None
            case FinishReason.STOP:
                return Finish("stop", event.token_id if event.is_stop_token else None)
            case FinishReason.LENGTH:
                return Finish("length")
            case FinishReason.CANCELLED:
                return Finish("abort")
            case FinishReason.ABORT:
                raise NotReady("the server is shutting down", retry_after_s=RETRY_AFTER_S)
            case FinishReason.ERROR:
                raise RequestFailed(event.error or "the engine failed")

    def _flush(self, last: TokenEvent) -> list[OutputEvent]:
        """Pass what the stages hold through the later ones, in order."""
        pieces = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        events = self._reader.push(pieces)
        closes_calls = last.is_stop_token and last.token_id == self._calls_end_id
        return events + self._reader.finish(closes_calls=closes_calls)

    def _reason(self, finish: Finish) -> Finish:
        """A call that was cut makes it `length` however it ended; complete calls make a stop `tool_calls`."""
        if finish.reason == "abort":
            return finish
        if self._reader.has_open_call:
            return Finish("length")
        if finish.reason == "stop" and self._reader.num_complete_calls:
            return replace(finish, reason="tool_calls")
        return finish


def _request_of_choice(request: GenerationRequest, choice: int) -> GenerationRequest:
    if choice == 0:
        return request
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
    return replace(request, request_id=f"{request.request_id}-{choice}", sampling=sampling)
