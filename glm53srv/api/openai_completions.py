"""The OpenAI completions protocol (raw prompts) as pure translation.

A prompt is text or token ids, one or several. Text is the client's own from the first token on: the spelling
of a control token in it stands for the token, and nothing is added. The answer's text spells markers out.

With logprobs, every sampled token has an entry, the stop id too (its text is empty), and with echo every
prompt token has one before them; the first prompt token has null, since nothing came before it. text_offset
counts characters. Evaluation harnesses slice these lists, so their lengths are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from glm53srv.api.completion_transcript import Delta, Transcript
from glm53srv.api.constraints import OutputFormat, constrain, parse_output_format
from glm53srv.api.openai_wire import (
    DONE,
    LEAD,
    TAIL,
    check_model,
    error_event,
    slowest,
    split_stops,
    timings_body,
    usage_body,
)
from glm53srv.api.plain_reader import PlainReader, ends_in_reasoning
from glm53srv.api.protocol import AnswerHead
from glm53srv.api.raw_prompts import Prompt, encode_prompts, parse_prompts
from glm53srv.api.schema import (
    MAX_CHOICES,
    StreamOptions,
    parse_sampling,
    parse_stop,
    parse_stream_options,
    ranged,
)
from glm53srv.api.served import ServedModel
from glm53srv.api.service import GenerationJob, StepOutput, Timings
from glm53srv.api.sse import KEEP_ALIVE
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.api.wire import Fields, parse_body
from glm53srv.errors import RequestError
from glm53srv.request import GenerationRequest, PromptLogprobs, SamplingParams, Usage

MAX_COMPLETION_LOGPROBS = 5
"""OpenAI API reference, completions: logprobs."""

MAX_BATCH = 64
"""Sequences of one request, prompts times choices: as many as the queue holds by default."""

REFUSED_FIELDS: Mapping[str, str] = {
    "suffix": "the model cannot fill in",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "send echo and logprobs",
}
"""Fields that would change the answer and cannot be honoured. null, false and "" are taken as absent."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One body, checked but not encoded. max_tokens: None means what is left of the context."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    num_choices: int = 1
    echo: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    is_stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    output_format: OutputFormat | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.sampling.num_logprobs is not None


def parse_completion_request(body: Mapping[str, Any], defaults: SamplingParams) -> CompletionRequest:
    """Check a decoded body. Raises InvalidRequest naming the field."""
    fields = Fields(dict(body))
    for name, remedy in REFUSED_FIELDS.items():
        if fields.raw(name) not in (None, False, ""):
            raise fields.error(name, f"is not supported: {remedy}")
    echo = fields.boolean("echo", False)
    prompts, _ = parse_prompts(fields, "prompt")
    num_choices = ranged(fields, "n", 1, MAX_CHOICES) or 1
    if (ranged(fields, "best_of", 1, MAX_CHOICES) or num_choices) != num_choices:
        raise fields.error("best_of", "must equal n; choices are not ranked")
    if len(prompts) * num_choices > MAX_BATCH:
        raise fields.error("prompt", f"asks for more than {MAX_BATCH} completions in one request; send fewer")
    num_logprobs = ranged(fields, "logprobs", 0, MAX_COMPLETION_LOGPROBS)
    max_tokens = ranged(fields, "max_tokens", 0, None)
    if max_tokens == 0 and not echo:
        raise fields.error("max_tokens", "must be 1 or more, or 0 together with echo")
    return CompletionRequest(
        model=fields.string("model"),
        prompts=prompts,
        sampling=parse_sampling(fields, defaults, num_logprobs),
        max_tokens=max_tokens,
        num_choices=num_choices,
        echo=echo,
        stop=parse_stop(fields),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        is_stream=fields.boolean("stream", False),
        stream_options=parse_stream_options(fields),
        output_format=parse_output_format(fields),
    )


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A checked request with its encoded prompts. echoes: the prompts' texts, empty unless they go out whole.

    (With log probabilities the prompt goes out piece by piece, as they come.)
    """

    request: CompletionRequest
    jobs: tuple[GenerationJob, ...]
    echoes: tuple[str, ...]

    @property
    def is_stream(self) -> bool:
        return self.request.is_stream

    @property
    def output_formats(self) -> Sequence[OutputFormat]:
        wanted = self.request.output_format
        return () if wanted is None else (wanted,)

    @property
    def ignored(self) -> Sequence[str]:
        return ()

    def new_writer(self, head: AnswerHead, model: ServedModel) -> CompletionWriter:
        return CompletionWriter(head, self, model)

    def new_builder(self, head: AnswerHead, model: ServedModel) -> CompletionBuilder:
        return CompletionBuilder(head, self, model)

    def transcripts(self, tokenizer: Tokenizer) -> list[Transcript]:
        """Make the transcript of every choice, in order."""
        return [
            Transcript(job, echo, tokenizer, echoes_tokens=self.request.echo and self.request.has_logprobs)
            for job, echo in zip(self.jobs, self.echoes, strict=True)
            for _ in range(self.request.num_choices)
        ]


def prepare_completion(body: bytes | bytearray, model: ServedModel, request_id: str) -> CompletionJob:
    """Parse, check and encode. Takes milliseconds for long prompts. Raises RequestError."""
    request = parse_completion_request(parse_body(body), model.defaults)
    check_model(request.model, model)
    prompts = encode_prompts(request.prompts, model, request.max_tokens)
    stop, stop_ids = split_stops(request.stop, model.tokenizer)
    sampling = replace(request.sampling, stop_token_ids=(*request.sampling.stop_token_ids, *stop_ids))
    wanted = None
    if request.echo and request.has_logprobs:
        wanted = PromptLogprobs(1, request.sampling.num_logprobs or 0)
    jobs = []
    for at, prompt_ids in enumerate(prompts):
        starts_in_reasoning = ends_in_reasoning(prompt_ids, model.tokenizer)
        jobs.append(
            GenerationJob(
                request=GenerationRequest(
                    request_id=request_id if at == 0 else f"{request_id}-p{at}",
                    prompt_ids=prompt_ids,
                    sampling=constrain(
                        sampling,
                        request.output_format,
                        model.tokenizer,
                        in_reasoning=starts_in_reasoning,
                    ),
                    max_tokens=request.max_tokens,
                    prompt_logprobs=wanted,
                ),
                new_reader=lambda begin=starts_in_reasoning: PlainReader(  # type: ignore[misc]  # bound now
                    starts_in_reasoning=begin
                ),
                stop=stop,
                include_stop=request.include_stop,
                num_choices=request.num_choices,
                skip_special_tokens=request.skip_special_tokens,
            )
        )
    echoes_whole = request.echo and not request.has_logprobs
    echoes = [_text_of(ids, model.tokenizer) if echoes_whole else "" for ids in prompts]
    return CompletionJob(request, tuple(jobs), tuple(echoes))


def _text_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode_bytes(prompt_ids).decode(errors="replace")


class CompletionWriter:
    """Spells the stream of one request (protocol.StreamWriter)."""

    def __init__(self, head: AnswerHead, job: CompletionJob, model: ServedModel) -> None:
        shared = _shared_body(head, model)
        self._prefix = LEAD + orjson.dumps(shared)[:-1] + b',"choices":['
        self._options = job.request.stream_options
        self._has_logprobs = job.request.has_logprobs
        self._transcripts = job.transcripts(model.tokenizer)
        self._timings: Timings | None = None

    def opening(self, usage: Usage) -> bytes:
        """Give the echo; a comment where there is none."""
        chunks = [KEEP_ALIVE]
        for choice, transcript in enumerate(self._transcripts):
            delta = transcript.opening()
            if delta.text or delta.tokens:
                chunks.append(self._chunk(choice, delta, None, usage))
        return b"".join(chunks)

    def step(self, output: StepOutput, usage: Usage) -> bytes:
        """Give the chunk of one step of one choice."""
        delta = self._transcripts[output.choice].step(output)
        reason, timings = None, None
        if output.finish is not None:
            reason = output.finish.reason
            self._timings = slowest(self._timings, output.timings)
            timings = None if output.timings is None else timings_body(output.usage, output.timings)
        if not delta.text and not delta.tokens and reason is None:
            return b""
        return self._chunk(output.choice, delta, reason, usage, timings)

    def closing(self, usage: Usage) -> bytes:
        """Give the usage chunk, if asked for, and the end."""
        if not self._options.include_usage:
            return DONE
        timings = b""
        if self._timings is not None:
            timings = b',"timings":' + orjson.dumps(timings_body(usage, self._timings))
        return b'%s],"usage":%s%s}%s%s' % (self._prefix, orjson.dumps(usage_body(usage)), timings, TAIL, DONE)

    def error(self, error: RequestError) -> bytes:
        """Give the last events of a stream that cannot go on."""
        return error_event(error)

    def _chunk(
        self,
        choice: int,
        delta: Delta,
        reason: str | None,
        usage: Usage,
        timings: dict[str, Any] | None = None,
    ) -> bytes:
        body = {
            "index": choice,
            "text": delta.text,
            "logprobs": delta.logprobs_body() if self._has_logprobs else None,
            "finish_reason": reason,
        }
        end = b"]"
        if self._options.include_usage or self._options.continuous_usage:
            shown = usage_body(usage) if self._options.continuous_usage else None
            end += b',"usage":' + orjson.dumps(shown)
        if timings is not None:
            end += b',"timings":' + orjson.dumps(timings)
        return self._prefix + orjson.dumps(body) + end + b"}" + TAIL


class CompletionBuilder:
    """Assembles the answer of a request that does not stream (protocol.AnswerBuilder)."""

    def __init__(self, head: AnswerHead, job: CompletionJob, model: ServedModel) -> None:
        self._head = head
        self._model = model
        self._has_logprobs = job.request.has_logprobs
        self._transcripts = job.transcripts(model.tokenizer)
        self._choices = [transcript.opening() for transcript in self._transcripts]
        self._reasons: list[str | None] = [None] * len(self._choices)
        self._timings: Timings | None = None

    def add(self, output: StepOutput) -> None:
        """Take one step of one choice."""
        self._choices[output.choice].extend(self._transcripts[output.choice].step(output))
        if output.finish is not None:
            self._reasons[output.choice] = output.finish.reason
            self._timings = slowest(self._timings, output.timings)

    def body(self, usage: Usage) -> dict[str, Any]:
        """Give the answer, once every choice has finished."""
        body = _shared_body(self._head, self._model)
        body["choices"] = [
            {
                "index": at,
                "text": choice.text,
                "logprobs": choice.logprobs_body() if self._has_logprobs else None,
                "finish_reason": reason,
            }
            for at, (choice, reason) in enumerate(zip(self._choices, self._reasons, strict=True))
        ]
        body["usage"] = usage_body(usage)
        if self._timings is not None:
            body["timings"] = timings_body(usage, self._timings)
        return body


def _shared_body(head: AnswerHead, model: ServedModel) -> dict[str, Any]:
    return {
        "id": head.answer_id,
        "object": "text_completion",
        "created": head.created,
        "model": model.name,
        "system_fingerprint": None,
    }
