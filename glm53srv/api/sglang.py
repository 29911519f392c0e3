"""SGLang's /generate as pure translation: body -> jobs, step outputs -> cumulative objects.

An event of the stream is the whole answer so far, `text` and `output_ids` from the beginning; the last one is
what a request that does not stream gets. output_ids has the stop id, as completion_tokens counts it. A log
probability is [value, token id, text or null]; the first prompt token's value is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from glm53srv.api.constraints import OutputFormat, constrain
from glm53srv.api.openai_wire import DONE, LEAD, TAIL, split_stops
from glm53srv.api.output_events import ContentDelta
from glm53srv.api.plain_reader import PlainReader, ends_in_reasoning
from glm53srv.api.protocol import AnswerHead
from glm53srv.api.raw_prompts import encode_prompts
from glm53srv.api.served import ServedModel
from glm53srv.api.service import Finish, GenerationJob, StepOutput, Timings
from glm53srv.api.sglang_request import GenerateRequest, PromptOptions, check_start, parse_generate_request
from glm53srv.api.sse import KEEP_ALIVE
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.api.wire import parse_body
from glm53srv.errors import RequestError
from glm53srv.request import GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs, Usage

Entry = list[Any]
"""[log probability or null, token id, text or null]."""

CLIENT_CLOSED = 499
"""status_code of an aborted output (the number nginx gave to a request whose client has gone)."""


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A checked request with its encoded prompts."""

    request: GenerateRequest
    jobs: tuple[GenerationJob, ...]

    @property
    def output_formats(self) -> Sequence[OutputFormat]:
        return [options.output_format for options in self.request.prompts if options.output_format]

    @property
    def is_stream(self) -> bool:
        return self.request.is_stream

    @property
    def ignored(self) -> Sequence[str]:
        return ()

    def new_writer(self, head: AnswerHead, model: ServedModel) -> GenerateWriter:
        return GenerateWriter(self, model.tokenizer)

    def new_builder(self, head: AnswerHead, model: ServedModel) -> GenerateBuilder:
        return GenerateBuilder(self, model.tokenizer)

    def outputs(self, tokenizer: Tokenizer) -> list[Output]:
        """Make the empty output of every choice, in order."""
        names = tokenizer if self.request.names_tokens else None
        return [
            Output(options, job, choice, names)
            for options, job in zip(self.request.prompts, self.jobs, strict=True)
            for choice in range(options.num_choices)
        ]


def prepare_generate(body: bytes | bytearray, model: ServedModel, request_id: str) -> GenerateJob:
    """Parse, check and encode. Takes milliseconds for long prompts. Raises RequestError."""
    request = parse_generate_request(parse_body(body), request_id)
    return GenerateJob(request, tuple(_job(options, model) for options in request.prompts))


def _job(options: PromptOptions, model: ServedModel) -> GenerationJob:
    (prompt_ids,) = encode_prompts((options.prompt,), model, options.max_tokens)
    check_start(options.logprob_start, prompt_ids)
    stop, stop_ids = split_stops(options.stop, model.tokenizer)
    sampling = replace(options.sampling, stop_token_ids=(*options.sampling.stop_token_ids, *stop_ids))
    wanted = None
    if options.logprob_start is not None:
        num_top = sampling.num_logprobs or 0
        wanted = PromptLogprobs(max(options.logprob_start, 1), num_top, sampling.logprob_token_ids)
    starts_in_reasoning = ends_in_reasoning(prompt_ids, model.tokenizer)
    sampling = constrain(sampling, options.output_format, model.tokenizer, in_reasoning=starts_in_reasoning)
    return GenerationJob(
        request=GenerationRequest(
            request_id=options.request_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=options.max_tokens,
            prompt_logprobs=wanted,
        ),
        new_reader=lambda: PlainReader(starts_in_reasoning=starts_in_reasoning),
        stop=stop,
        include_stop=options.keeps_stop,
        num_choices=options.num_choices,
        skip_special_tokens=options.skip_special_tokens,
    )


class Output:
    """One choice's answer while it grows. names: spells tokens in log probabilities, None: it need not."""

    def __init__(
        self, options: PromptOptions, job: GenerationJob, choice: int, names: Tokenizer | None
    ) -> None:
        self._options = options
        self._names = names
        self._prompt_ids = job.request.prompt_ids
        rid = options.request_id
        self._rid = rid if choice == 0 else f"{rid}-{choice}"
        self._text = ""
        self._ids = _GrowingList()
        self._usage = Usage(0, 0)
        self._finish: Finish | None = None
        self._timings: Timings | None = None
        self._input = _LogprobLists(options)
        self._output = _LogprobLists(options)
        self._next_position = len(self._prompt_ids)
        if options.logprob_start is not None:
            self._next_position = options.logprob_start
            if options.logprob_start == 0:
                self._judge_prompt(None)

    def add(self, output: StepOutput) -> None:
        """Take one step."""
        for news in output.prompt:
            for logprobs in news.logprobs:
                self._judge_prompt(logprobs)
        self._text += "".join(event.text for event in output.events if isinstance(event, ContentDelta))
        for token in output.tokens:
            self._take(token)
        if output.end_token is not None:
            self._take(output.end_token)
        self._usage = output.usage
        self._finish = output.finish
        self._timings = output.timings

    def body(self) -> dict[str, Any]:
        """Give the answer so far."""
        usage, timings = self._usage, self._timings or Timings()
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": self._finish_body(),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "weight_version": "default",
            "num_retractions": timings.num_preemptions,
        }
        if self._finish is not None:
            meta["e2e_latency"] = timings.total_s
        if self._options.has_logprobs:
            meta.update(self._input.body("input"))
            meta.update(self._output.body("output"))
        return {"text": self._text, "output_ids": self._ids.spelled(), "meta_info": meta}

    def _finish_body(self) -> dict[str, Any] | None:
        finish = self._finish
        if finish is None:
            return None
        if finish.reason == "length":
            return {"type": "length", "length": self._usage.completion_tokens}
        if finish.reason == "abort":
            message = "the request was ended by /abort_request"
            return {
                "type": "abort",
                "message": message,
                "status_code": CLIENT_CLOSED,
                "err_type": "AbortedError",
            }
        return {"type": "stop", "matched": finish.matched}

    def _judge_prompt(self, logprobs: TokenLogprobs | None) -> None:
        self._input.add(self._prompt_ids[self._next_position], logprobs, self._names)
        self._next_position += 1

    def _take(self, token: TokenEvent) -> None:
        assert token.token_id is not None, "a step's tokens are tokens"
        self._ids.append(token.token_id)
        if token.logprobs is not None:
            self._output.add(token.token_id, token.logprobs, self._names)


class _LogprobLists:
    """The parallel lists of input or output tokens."""

    def __init__(self, options: PromptOptions) -> None:
        self._has_top = bool(options.sampling.num_logprobs)
        self._has_named = bool(options.sampling.logprob_token_ids)
        self._tokens = _GrowingList()
        self._top = _GrowingList()
        self._named = _GrowingList()

    def add(self, token_id: int, logprobs: TokenLogprobs | None, names: Tokenizer | None) -> None:
        """Take one token; logprobs None: nothing came before it."""

        def entry(entry_id: int, value: float | None) -> Entry:
            text = None if names is None else names.token_bytes(entry_id).decode(errors="replace")
            return [value, entry_id, text]

        if logprobs is None:
            self._tokens.append(entry(token_id, None))
            self._top.append(None)
            self._named.append(None)
            return
        self._tokens.append(entry(token_id, logprobs.logprob))
        self._top.append([entry(*pair) for pair in logprobs.top])
        self._named.append([entry(*pair) for pair in logprobs.others])

    def body(self, side: str) -> dict[str, Any]:
        """Spell the lists. side: input or output."""
        body: dict[str, Any] = {f"{side}_token_logprobs": self._tokens.spelled()}
        if self._has_top:
            body[f"{side}_top_logprobs"] = self._top.spelled()
        if self._has_named:
            body[f"{side}_token_ids_logprobs"] = self._named.spelled()
        return body


class _GrowingList:
    """A JSON list that only grows, spelled as it grows: every event of a cumulative stream repeats it."""

    def __init__(self) -> None:
        self._json = bytearray()

    def append(self, value: object) -> None:
        """Add an element."""
        if self._json:
            self._json += b","
        self._json += orjson.dumps(value)

    def spelled(self) -> orjson.Fragment:
        """Give the list as a part of a larger value."""
        return orjson.Fragment(b"[" + self._json + b"]")


class GenerateWriter:
    """Spells the stream of one request (protocol.StreamWriter)."""

    def __init__(self, job: GenerateJob, tokenizer: Tokenizer) -> None:
        self._is_list = job.request.is_list
        self._outputs = job.outputs(tokenizer)

    def opening(self, usage: Usage) -> bytes:
        """Give a comment: nothing is known yet."""
        return KEEP_ALIVE

    def step(self, output: StepOutput, usage: Usage) -> bytes:
        """Give one choice's answer so far."""
        grown = self._outputs[output.choice]
        grown.add(output)
        body = grown.body()
        if self._is_list:
            body["index"] = output.choice
        return LEAD + orjson.dumps(body) + TAIL

    def closing(self, usage: Usage) -> bytes:
        """Give the end."""
        return DONE

    def error(self, error: RequestError) -> bytes:
        """Give the last events of a stream that cannot go on."""
        body = {
            "message": error.message,
            "type": error.type,
            "code": error.status,
            "retryable": error.retry_after_s is not None,
        }
        return LEAD + orjson.dumps({"error": body}) + TAIL + DONE


class GenerateBuilder:
    """Assembles the answer of a request that does not stream (protocol.AnswerBuilder)."""

    def __init__(self, job: GenerateJob, tokenizer: Tokenizer) -> None:
        self._is_list = job.request.is_list
        self._outputs = job.outputs(tokenizer)

    def add(self, output: StepOutput) -> None:
        """Take one step of one choice."""
        self._outputs[output.choice].add(output)

    def body(self, usage: Usage) -> object:
        """Give one object, or a list of them."""
        if not self._is_list:
            return self._outputs[0].body()
        return [{**output.body(), "index": at} for at, output in enumerate(self._outputs)]
