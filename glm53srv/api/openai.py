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
from glm53srv.api.output_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
)
from glm53srv.api.output_parser import OutputParser
from glm53srv.api.schema import ChatRequest, parse_chat_request
from glm53srv.api.served import OWNER, ServedModel
from glm53srv.api.service import Finish, GenerationJob, StepOutput
from glm53srv.api.tokenizer import Tokenizer, TooManyIds
from glm53srv.api.tool_types import tool_schemas
from glm53srv.api.wire import parse_body
from glm53srv.errors import ContextLengthExceeded, ModelNotFound, RequestError
from glm53srv.request import GenerationRequest, TokenEvent, Usage

DONE = b"data: [DONE]\n\n"
_LEAD, _TAIL = b"data: ", b"\n\n"


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A checked request with its rendered, encoded prompt."""

    request: ChatRequest
    generation: GenerationJob


def prepare_chat(body: bytes | bytearray, model: ServedModel, request_id: str) -> ChatJob:
    """Parse, check, render and encode. Takes milliseconds for long prompts, so run it in a thread then.

    Raises RequestError.
    """
    request = parse_chat_request(parse_body(body), model.defaults)
    check_model(request.model, model)
    prompt = render_chat(request.messages, request.tools, request.template)
    stop, stop_ids = _split_stops(request.stop, model.tokenizer)
    sampling = request.sampling
    sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *stop_ids))
    tools = tool_schemas(request.tools)
    return ChatJob(
        request,
        GenerationJob(
            request=GenerationRequest(
                request_id=request_id,
                prompt_ids=_encode(prompt, model, request.max_tokens),
                sampling=sampling,
                max_tokens=request.max_tokens,
            ),
            new_reader=lambda: OutputParser(tools, starts_in_reasoning=prompt.ends_in_reasoning),
            stop=stop,
            include_stop=request.include_stop,
            max_calls=None if request.parallel_calls else 1,
            num_choices=request.num_choices,
        ),
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


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise ModelNotFound for a name that is not served; no name means the one model there is."""
    if name is not None and name != model.name:
        raise ModelNotFound(
            f"The model {name!r} does not exist; this server serves {model.name!r}", param="model"
        )


def _split_stops(stops: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Special tokens never become text, so a stop string that spells one is a stop id."""
    texts, ids = [], []
    for stop in stops:
        token_id = tokenizer.control_id(stop)
        if token_id is not None and tokenizer.is_special(token_id):
            ids.append(token_id)
        texts.append(stop)  # the model may also spell it out of ordinary tokens
    return tuple(texts), tuple(ids)


def error_body(error: RequestError) -> dict[str, Any]:
    """Give the body of an error answer."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_event(error: RequestError) -> bytes:
    """Give the last events of a stream that cannot go on."""
    return _LEAD + orjson.dumps(error_body(error)) + _TAIL + DONE


def usage_body(usage: Usage) -> dict[str, Any]:
    """Spell token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def model_body(model: ServedModel) -> dict[str, Any]:
    """Describe the model; the context is the one that can be served."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_tokens,
    }


class ChunkWriter:
    """Spells the stream of one request. The part that all chunks share is serialised once."""

    def __init__(self, answer_id: str, created: int, job: ChatJob, model: ServedModel) -> None:
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model.name,
            "system_fingerprint": None,
        }
        self._prefix = _LEAD + orjson.dumps(head)[:-1] + b',"choices":['
        self._options = job.request.stream_options
        self._wants_usage = self._options.include_usage or self._options.continuous_usage
        self._has_logprobs = job.generation.request.sampling.num_logprobs is not None
        self._tokenizer = model.tokenizer
        self._calls = [CallIds(answer_id, choice) for choice in range(job.request.num_choices)]

    def opening(self, usage: Usage) -> bytes:
        """Give the role chunk of every choice; sent before prefill, so that something is."""
        role = {"role": "assistant", "content": ""}
        shown = usage if self._options.continuous_usage else None
        return b"".join(self._chunk(choice, role, b"null", None, shown) for choice in range(len(self._calls)))

    def step(self, output: StepOutput, usage: Usage) -> bytes:
        """Give the chunks of one step of one choice, the finish chunk too if it ended."""
        shown = usage if self._options.continuous_usage else None
        calls = self._calls[output.choice]
        deltas = [delta for event in output.events if (delta := _delta(event, calls)) is not None]
        logprobs = b"null"
        if self._has_logprobs and output.tokens:
            logprobs = orjson.dumps(logprobs_body(output.tokens, self._tokenizer))
            deltas = deltas or [{}]
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(output.choice, delta, logprobs, None, shown))
            logprobs = b"null"
        if output.finish is not None:
            chunks.append(self._chunk(output.choice, {}, b"null", output.finish.reason, shown))
        return b"".join(chunks)

    def closing(self, usage: Usage) -> bytes:
        """Give what follows the last finish chunk."""
        if not self._options.include_usage:
            return DONE
        return self._prefix + b'],"usage":' + orjson.dumps(usage_body(usage)) + b"}" + _TAIL + DONE

    def _chunk(
        self, choice: int, delta: dict[str, Any], logprobs: bytes, reason: str | None, usage: Usage | None
    ) -> bytes:
        finish = b"null" if reason is None else b'"%s"' % reason.encode()
        end = b"]}" + _TAIL
        if self._wants_usage:
            end = b'],"usage":' + (b"null" if usage is None else orjson.dumps(usage_body(usage)))
            end += b"}" + _TAIL
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


class AnswerBuilder:
    """Assembles the answer of a request that does not stream; equal to its stream put together.

    A call that was cut is left out: running half a command is worse than running none.
    """

    def __init__(self, answer_id: str, created: int, job: ChatJob, model: ServedModel) -> None:
        self._answer_id = answer_id
        self._created = created
        self._model = model
        self._has_logprobs = job.generation.request.sampling.num_logprobs is not None
        self._choices = [_Choice() for _ in range(job.request.num_choices)]

    def add(self, output: StepOutput) -> None:
        """Take one step of one choice."""
        choice = self._choices[output.choice]
        if self._has_logprobs:
            choice.tokens += output.tokens
        choice.finish = output.finish or choice.finish
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
        return {
            "id": self._answer_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": None,
            "choices": [self._choice_body(at, choice) for at, choice in enumerate(self._choices)],
            "usage": usage_body(usage),
        }

    def _choice_body(self, at: int, choice: _Choice) -> dict[str, Any]:
        ids = CallIds(self._answer_id, at)
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
