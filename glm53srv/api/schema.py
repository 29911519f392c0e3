"""The body of POST /v1/chat/completions, checked whole before any response starts.

Every field is honoured, refused with 400, or ignored with a reason; the tables below say which. A field that
no table names is ignored too, since clients send extras; a known one of a wrong type or value never is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from glm53srv.api.chat_template import ChatMessage, TemplateOptions
from glm53srv.api.messages import parse_messages, parse_tools
from glm53srv.api.wire import Fields, invalid
from glm53srv.errors import InvalidRequest
from glm53srv.request import MAX_LOGPROBS, SamplingParams

IGNORED_FIELDS: Mapping[str, str] = {
    "user": "a label of the client's",
    "safety_identifier": "a label of the client's",
    "metadata": "a label of the client's",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prefixes are found by their tokens",
    "verbosity": "the model has no such control",
    "prediction": "outputs are not predicted",
    "web_search_options": "there is no search",
    "cache_prompt": "prefixes are reused whenever possible",
    "return_progress": "prefill progress is not reported yet",
}
"""Known fields that change nothing, with the reason."""

REFUSED_FIELDS: Mapping[str, str] = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "the server is text only",
    "structured_outputs": "constrained output is not supported",
    "guided_json": "constrained output is not supported",
    "guided_regex": "constrained output is not supported",
    "guided_grammar": "constrained output is not supported",
    "guided_choice": "constrained output is not supported",
    "json_schema": "constrained output is not supported",
    "regex": "constrained output is not supported",
    "grammar": "constrained output is not supported",
    "ebnf": "constrained output is not supported",
}
"""Fields that would change the answer and cannot be honoured. null and false are taken as absent."""

EFFORTS: Mapping[str, str] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "max",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""The model knows low, high and max; its template gives max for medium, and so do we."""

KNOWN_TEMPLATE_KWARGS = ("enable_thinking", "thinking", "clear_thinking", "reasoning_effort")
MAX_CHOICES = 16
MAX_STOPS = 64
MAX_STOP_CHARS = 1024


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """include_usage: a last chunk with usage. continuous_usage: usage on every chunk."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat completion, checked.

    max_tokens: None means what is left of the context. tools: bare function objects; empty also when
    tool_choice is none. ignored: template arguments that nobody reads, for the log.
    """

    model: str | None
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    parallel_calls: bool = True
    is_stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    ignored: tuple[str, ...] = ()


def parse_chat_request(body: Mapping[str, Any], defaults: SamplingParams) -> ChatRequest:
    """Check a decoded body. defaults: sampling values for fields the client leaves out.

    Raises InvalidRequest naming the field.
    """
    fields = Fields(dict(body))
    _refuse_unsupported(fields)
    kwargs = fields.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")
    return ChatRequest(
        model=fields.string("model"),
        messages=parse_messages(fields),
        tools=_parse_tool_choice(fields),
        template=_parse_template(fields, kwargs),
        sampling=_parse_sampling(fields, defaults),
        max_tokens=_parse_max_tokens(fields),
        num_choices=_ranged(fields, "n", 1, MAX_CHOICES) or 1,
        stop=_parse_stop(fields),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        parallel_calls=fields.boolean("parallel_tool_calls", True),
        is_stream=fields.boolean("stream", False),
        stream_options=_parse_stream_options(fields),
        ignored=tuple(sorted(name for name, _ in kwargs.items() if name not in KNOWN_TEMPLATE_KWARGS)),
    )


def _refuse_unsupported(fields: Fields) -> None:
    for name, remedy in REFUSED_FIELDS.items():
        if fields.raw(name) not in (None, False):
            raise fields.error(name, f"is not supported: {remedy}")
    response_format = fields.object("response_format")
    if response_format is not None and response_format.string("type") not in (None, "text"):
        raise response_format.error("type", "must be text; constrained output is not supported")
    if any(modality != "text" for modality in fields.list("modalities")):
        raise fields.error("modalities", 'must be ["text"]; the server is text only')
    if fields.boolean("continue_final_message", False):
        raise fields.error("continue_final_message", "is not supported")
    if not fields.boolean("add_generation_prompt", True):
        raise fields.error("add_generation_prompt", "must be true in a chat completion")


def _parse_tool_choice(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    tools = parse_tools(fields)
    choice = fields.raw("tool_choice")
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    raise fields.error("tool_choice", "must be auto or none; a forced call is not supported")


def _parse_template(fields: Fields, kwargs: Fields) -> TemplateOptions:
    """chat_template_kwargs win over the same names at the top; `thinking` is Z.ai's object or a boolean."""
    thinking = True
    if isinstance(fields.raw("thinking"), dict):
        wire = Fields(fields.raw("thinking"), "thinking")
        thinking = wire.string("type") != "disabled"
        clear = wire.boolean("clear_thinking", False)
    else:
        thinking = fields.boolean("thinking", True)
        clear = False
    thinking = fields.boolean("enable_thinking", thinking)
    thinking = kwargs.boolean("enable_thinking", kwargs.boolean("thinking", thinking))
    clear = kwargs.boolean("clear_thinking", fields.boolean("clear_thinking", clear))
    source = kwargs if kwargs.has("reasoning_effort") else fields
    effort = source.string("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise source.error("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    return TemplateOptions(
        reasoning_effort=None if effort is None else EFFORTS[effort],
        clear_thinking=clear,
        enable_thinking=thinking,
    )


def _parse_sampling(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    """Take the defaults, then what the client gave; SamplingParams checks the ranges."""
    given: dict[str, Any] = {}
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        number = fields.number(name)
        if number is not None:
            given[name] = number
    for name in ("seed", "min_tokens", "top_k"):
        whole = fields.integer(name)
        if whole is not None:
            given[name] = max(whole, 0) if name == "top_k" and whole == -1 else whole
    return replace(
        defaults,
        **given,
        logit_bias=_parse_logit_bias(fields),
        num_logprobs=_parse_logprobs(fields),
        stop_token_ids=_parse_ids(fields, "stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos", False),
    )


def _parse_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs")
    if not fields.boolean("logprobs", False):
        if top:
            raise fields.error("top_logprobs", "needs logprobs: true")
        return None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise fields.error("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    return top or 0


def _parse_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    table = fields.object("logit_bias")
    if table is None:
        return ()
    pairs = []
    for key in table.names():
        bias = table.number(key)
        if not key.isascii() or not key.isdigit() or len(key) > 9 or bias is None:
            raise fields.error("logit_bias", "must map token ids to numbers")
        pairs.append((int(key), bias))
    return tuple(pairs)


def _parse_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids: Sequence[object] = fields.list(name)
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in ids):
        raise fields.error(name, "must be a list of token ids")
    return tuple(entry for entry in ids if isinstance(entry, int))


def _parse_max_tokens(fields: Fields) -> int | None:
    """The newer name wins where a client sends both."""
    newer = _ranged(fields, "max_completion_tokens", 1, None)
    older = _ranged(fields, "max_tokens", 1, None)
    return older if newer is None else newer


def _parse_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fields.error("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    for at, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            path = "stop" if isinstance(value, str) else f"stop[{at}]"
            raise invalid(path, f"must be a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _parse_stream_options(fields: Fields) -> StreamOptions:
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions()
    continuous = options.boolean("continuous_usage_stats", False)
    return StreamOptions(options.boolean("include_usage", False), continuous)


def _ranged(fields: Fields, name: str, low: int, high: int | None) -> int | None:
    value = fields.integer(name)
    if value is not None and (value < low or (high is not None and value > high)):
        limit = f"between {low} and {high}" if high is not None else f"{low} or more"
        raise InvalidRequest(f"{name} must be {limit}", param=name)
    return value
