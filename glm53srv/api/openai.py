"""The OpenAI chat protocol as pure translation: body -> job, step outputs -> chunks or one answer.

Wire rules kept here: id, created and model are equal in all chunks; role only in a choice's first delta;
finish_reason in every choice object, null until the one chunk that ends the choice; the usage chunk has an
empty list of choices; id, type and name of a call only in its first delta, and its index in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from glm53srv.api.chat_template import RenderedPrompt, render_chat
from glm53srv.api.constraints import OutputFormat, constrain
from glm53srv.api.openai_wire import (
    DONE,
    LEAD,
    TAIL,
    check_model,
    error_event,
    progress_body,
    slowest,
    split_stops,
    timings_body,
    usage_body,
)
from glm53srv.api.output_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
)
from glm53srv.api.output_parser import OutputParser
from glm53srv.api.protocol import AnswerHead
from glm53srv.api.schema import ChatRequest, parse_chat_request
from glm53srv.api.served import ServedModel
from glm53srv.api.service import Finish, GenerationJob, StepOutput, Timings
from glm53srv.api.tokenizer import Tokenizer, TooManyIds
from glm53srv.api.tool_grammar import tool_format
from glm53srv.api.tool_types import tool_schemas
from glm53srv.api.wire import parse_body
from glm53srv.errors import ContextLengthExceeded, RequestError
from glm53srv.request import GenerationRequest, PromptNews, TokenEvent, Usage


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A checked request with its rendered, encoded prompt. output_format: still to be compiled."""

    request: ChatRequest
    generation: GenerationJob
    output_format: OutputFormat | None = None

    @property
    def jobs(self) -> Sequence[GenerationJob]:
        return (self.generation,)

    @property
    def output_formats(self) -> Sequence[OutputFormat]:
        return () if self.output_format is None else (self.output_format,)

    @property
    def is_stream(self) -> bool:
        return self.request.is_stream

    @property
    def ignored(self) -> Sequence[str]:
        return self.request.ignored

    def new_writer(self, head: AnswerHead, model: ServedModel) -> ChunkWriter:
        return ChunkWriter(head, self, model)

    def new_builder(self, head: AnswerHead, model: ServedModel) -> ChatBuilder:
        return ChatBuilder(head, self, model)


def prepare_chat(body: bytes | bytearray, model: ServedModel, request_id: str) -> ChatJob:
    """Parse, check, render and encode. Takes milliseconds for long prompts, so run it in a thread then.

    Raises RequestError.
    """
    request = parse_chat_request(parse_body(body), model.defaults)
    check_model(request.model, model)
    prompt = render_chat(request.messages, request.tools, request.template)
    stop, stop_ids = split_stops(request.stop, model.tokenizer)
    wanted = tool_format(
        request.tools,
        request.tool_choice,
        request.output_format,
        model.tokenizer,
        parallel=request.parallel_calls,
    )
    sampling = constrain(
        replace(request.sampling, stop_token_ids=(*request.sampling.stop_token_ids, *stop_ids)),
        wanted,
        model.tokenizer,
        in_reasoning=prompt.ends_in_reasoning,
        thinking_budget=request.thinking_budget,
    )
    tools = tool_schemas(request.tools)
    return ChatJob(
        request,
        GenerationJob(
            request=GenerationRequest(
                request_id=request_id,
                prompt_ids=_encode(prompt, model, request.max_tokens),
                sampling=sampling,
                max_tokens=request.max_tokens,
                reports_prompt=request.returns_progress and request.is_stream,
            ),
            new_reader=lambda: OutputParser(
                tools, starts_in_reasoning=prompt.ends_in_reasoning, reads_calls=bool(tools)
            ),
            stop=stop,
            include_stop=request.include_stop,
            max_calls=None if request.parallel_calls else 1,
            num_choices=request.num_choices,
            skip_special_tokens=request.skip_special_tokens,
        ),
        wanted,
    )


def _encode(prompt: RenderedPrompt, model: ServedModel, max_tokens: int | None) -> tuple[int, ...]:
    """Encode, and refuse here, off the event loop, what the scheduler would refuse there."""
    try:
        return model.tokenizer.encode(prompt.segments, max_ids=model.context_tokens - 1)
    except TooManyIds as error:
        raise ContextLengthExceeded(
            limit_tokens=model.context_tokens,
            prompt_tokens=error.num_ids,
            completion_tokens=max_tokens or 1,
            param="messages",
        ) from error


class ChunkWriter:
    """Spells the stream of one request. The part that all chunks share is serialised once."""

    def __init__(self, head: AnswerHead, job: ChatJob, model: ServedModel) -> None:
        shared = {
            "id": head.answer_id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": model.name,
            "system_fingerprint": None,
        }
        self._prefix = LEAD + orjson.dumps(shared)[:-1] + b',"choices":['
        self._options = job.request.stream_options
        self._wants_usage = self._options.include_usage or self._options.continuous_usage
        self._has_logprobs = job.generation.request.sampling.num_logprobs is not None
        self._tokenizer = model.tokenizer
        self._calls = [CallIds(head.answer_id, choice) for choice in range(job.request.num_choices)]
        self._timings: Timings | None = None
        self._returns_progress = job.request.returns_progress

    def opening(self, usage: Usage) -> bytes:
        """Give the role chunk of every choice; sent before prefill, so that something is."""
        role = {"role": "assistant", "content": ""}
        shown = usage if self._options.continuous_usage else None
        chunks = [self._chunk(choice, role, b"null", None, shown) for choice in range(len(self._calls))]
        if self._returns_progress:  # the first report is where the cache ends
            chunks.append(self._progress(usage, PromptNews(usage.cached_tokens, 0.0)))
        return b"".join(chunks)

    def step(self, output: StepOutput, usage: Usage) -> bytes:
        """Give the chunks of one step of one choice, the finish chunk too if it ended."""
        shown = usage if self._options.continuous_usage else None
        calls = self._calls[output.choice]
        deltas = [delta for event in output.events if (delta := _delta(event, calls)) is not None]
        chunks = [self._progress(output.usage, news) for news in output.prompt]
        logprobs = b"null"
        if self._has_logprobs and output.tokens:
            logprobs = orjson.dumps(logprobs_body(output.tokens, self._tokenizer))
            deltas = deltas or [{}]
        for delta in deltas:
            chunks.append(self._chunk(output.choice, delta, logprobs, None, shown))
            logprobs = b"null"
        if output.finish is not None:
            extra = b""
            if output.timings is not None:
                self._timings = slowest(self._timings, output.timings)
                extra = b',"timings":' + orjson.dumps(timings_body(output.usage, output.timings))
            chunks.append(self._chunk(output.choice, {}, b"null", output.finish.reason, shown, extra))
        return b"".join(chunks)

    def closing(self, usage: Usage) -> bytes:
        """Give what follows the last finish chunk."""
        if not self._options.include_usage:
            return DONE
        extra = b""
        if self._timings is not None:
            extra = b',"timings":' + orjson.dumps(timings_body(usage, self._timings))
        return self._prefix + b'],"usage":' + orjson.dumps(usage_body(usage)) + extra + b"}" + TAIL + DONE

    def error(self, error: RequestError) -> bytes:
        """Give the last events of a stream that cannot go on."""
        return error_event(error)

    def _progress(self, usage: Usage, news: PromptNews) -> bytes:
        """Give a chunk without choices that says how far the prompt is."""
        progress = orjson.dumps(progress_body(usage, news))
        return self._prefix + b'],"prompt_progress":' + progress + b"}" + TAIL

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: bytes,
        reason: str | None,
        usage: Usage | None,
        extra: bytes = b"",
    ) -> bytes:
        """Spell one chunk. extra: further members of it, from the comma on."""
        finish = b"null" if reason is None else b'"%s"' % reason.encode()
        end = b"]" + extra
        if self._wants_usage:
            end += b',"usage":' + (b"null" if usage is None else orjson.dumps(usage_body(usage)))
        end += b"}" + TAIL
        return b'%s{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}%s' % (
            self._prefix,
            choice,
            orjson.dumps(delta),
            logprobs,
            finish,
            end,
        )


@dataclass(slots=True)
class CallIds:
    """The ids of one choice's calls: unique within the answer, and over answers."""

    answer_id: str
    choice: int

    def of(self, index: int) -> str:
        """Give the id of call `index`."""
        stem = self.answer_id.removeprefix("chatcmpl-")
        return f"call_{stem}_{self.choice}_{index}"


def _delta(event: OutputEvent, calls: CallIds) -> dict[str, Any] | None:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            entry = {"index": index, "id": calls.of(index), "type": "function", "function": function}
            return {"tool_calls": [entry]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


def logprobs_body(tokens: Sequence[TokenEvent], tokenizer: Tokenizer) -> dict[str, Any]:
    """Spell the log probabilities of sampled tokens, reasoning included."""
    content = []
    for token in tokens:
        if token.logprobs is None or token.token_id is None:
            continue
        entry = _logprob_entry(token.token_id, token.logprobs.logprob, tokenizer)
        entry["top_logprobs"] = [
            _logprob_entry(token_id, logprob, tokenizer) for token_id, logprob in token.logprobs.top
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _logprob_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """bytes are exact; the token's text has U+FFFD where it is a part of a character."""
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)
    is_complete: bool = False


@dataclass(slots=True)
class _Choice:
    """One choice's answer while it grows."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: Finish | None = None


class ChatBuilder:
    """Assembles the answer of a request that does not stream; equal to its stream put together.

    A call that was cut is left out: running half a command is worse than running none.
    """

    def __init__(self, head: AnswerHead, job: ChatJob, model: ServedModel) -> None:
        self._head = head
        self._timings: Timings | None = None
        self._model = model
        self._has_logprobs = job.generation.request.sampling.num_logprobs is not None
        self._choices = [_Choice() for _ in range(job.request.num_choices)]

    def add(self, output: StepOutput) -> None:
        """Take one step of one choice."""
        choice = self._choices[output.choice]
        if self._has_logprobs:
            choice.tokens += output.tokens
        choice.finish = output.finish or choice.finish
        self._timings = slowest(self._timings, output.timings)
        for event in output.events:
            match event:
                case ContentDelta(text):
                    choice.content.append(text)
                case ReasoningDelta(text):
                    choice.reasoning.append(text)
                case CallStart(_, name):
                    choice.calls.append(_Call(name))
                case CallArguments(index, text):
                    choice.calls[index].arguments.append(text)
                case CallEnd(index):
                    choice.calls[index].is_complete = True

    def body(self, usage: Usage) -> dict[str, Any]:
        """Give the answer, once every choice has finished."""
        body = {
            "id": self._head.answer_id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._model.name,
            "system_fingerprint": None,
            "choices": [self._choice_body(at, choice) for at, choice in enumerate(self._choices)],
            "usage": usage_body(usage),
        }
        if self._timings is not None:
            body["timings"] = timings_body(usage, self._timings)
        return body

    def _choice_body(self, at: int, choice: _Choice) -> dict[str, Any]:
        ids = CallIds(self._head.answer_id, at)
        calls = [
            {
                "id": ids.of(index),
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for index, call in enumerate(choice.calls)
            if call.is_complete
        ]
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if calls:
            message["tool_calls"] = calls
        logprobs = logprobs_body(choice.tokens, self._model.tokenizer) if self._has_logprobs else None
        return {
            "index": at,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": None if choice.finish is None else choice.finish.reason,
        }
