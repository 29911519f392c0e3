"""The body of POST /v1/chat/completions, checked whole before any response starts.

Every field is honoured, refused with 400, or ignored with a reason; the tables below say which. A field that
no table names is ignored too, since clients send extras; a known one of a wrong type or value never is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from glm53srv.api.chat_template import ChatMessage, TemplateOptions
from glm53srv.api.constraints import OutputFormat, parse_output_format
from glm53srv.api.messages import parse_messages, parse_tools
from glm53srv.api.tool_grammar import ToolChoice
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
}
"""Known fields that change nothing, with the reason."""

REFUSED_FIELDS: Mapping[str, str] = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "the server is text only",
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

KNOWN_TEMPLATE_KWARGS = (
    "enable_thinking",
    "thinking",
    "clear_thinking",
    "reasoning_effort",
    "thinking_budget",
)
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
    tool_choice is none. output_format: of the answer, where it is not a call. thinking_budget: most tokens of
    reasoning. returns_progress: tell in the stream how far the prompt is. ignored: arguments for the template
    that nobody reads, for the log.
    """

    model: str | None
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    output_format: OutputFormat | None = None
    thinking_budget: int | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    parallel_calls: bool = True
    is_stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    returns_progress: bool = False
    skip_special_tokens: bool = True
    ignored: tuple[str, ...] = ()


def parse_chat_request(body: Mapping[str, Any], defaults: SamplingParams) -> ChatRequest:
    """Check a decoded body. defaults: sampling values for fields the client leaves out.

    Raises InvalidRequest naming the field.
    """
    fields = Fields(dict(body))
    _refuse_unsupported(fields)
    messages = parse_messages(fields)
    tools, tool_choice = _parse_tools(fields)
    kwargs = _template_kwargs(fields)
    return ChatRequest(
        model=fields.string("model"),
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        output_format=parse_output_format(fields),
        thinking_budget=_parse_thinking_budget(fields, kwargs),
        template=_parse_template(fields, kwargs, messages),
        sampling=parse_sampling(fields, defaults, _parse_logprobs(fields)),
        max_tokens=_parse_max_tokens(fields),
        num_choices=ranged(fields, "n", 1, MAX_CHOICES) or 1,
        stop=parse_stop(fields),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        parallel_calls=fields.boolean("parallel_tool_calls", True),
        is_stream=fields.boolean("stream", False),
        stream_options=parse_stream_options(fields),
        returns_progress=fields.boolean("return_progress", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        ignored=tuple(sorted(name for name, _ in kwargs.items() if name not in KNOWN_TEMPLATE_KWARGS)),
    )


ChatPrompt = tuple[tuple[ChatMessage, ...], tuple[Mapping[str, Any], ...], TemplateOptions]


def parse_chat_prompt(fields: Fields) -> ChatPrompt:
    """Read what a prompt is rendered from: messages, tools, template options. Raises InvalidRequest."""
    messages = parse_messages(fields)
    tools, _ = _parse_tools(fields)
    return messages, tools, _parse_template(fields, _template_kwargs(fields), messages)


def _template_kwargs(fields: Fields) -> Fields:
    return fields.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")


def _refuse_unsupported(fields: Fields) -> None:
    for name, remedy in REFUSED_FIELDS.items():
        if fields.raw(name) not in (None, False):
            raise fields.error(name, f"is not supported: {remedy}")
    if any(modality != "text" for modality in fields.list("modalities")):
        raise fields.error("modalities", 'must be ["text"]; the server is text only')


def _parse_tools(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice]:
    """Read tools and tool_choice; with `none` the prompt shows no tools."""
    tools = parse_tools(fields)
    choice = fields.raw("tool_choice")
    if choice == "none":
        return (), ToolChoice()
    if choice in (None, "auto"):
        return tools, ToolChoice()
    if not tools:
        raise fields.error("tool_choice", "needs tools")
    if choice == "required":
        return tools, ToolChoice(required=True)
    if isinstance(choice, dict):
        return tools, _parse_named_choice(Fields(choice, "tool_choice"), tools)
    raise fields.error("tool_choice", "must be auto, none, required or a function")


def _parse_named_choice(wire: Fields, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Read `{"type": "function", "function": {"name": ...}}`, or the name beside the type (Responses)."""
    if wire.string("type") not in (None, "function"):
        raise wire.error("type", "must be function")
    holder = wire.object("function") or wire
    name = holder.string("name")
    if name is None or all(tool["name"] != name for tool in tools):
        raise holder.error("name", "must be the name of one of the tools")
    return ToolChoice(name=name)


def _parse_template(fields: Fields, kwargs: Fields, messages: Sequence[ChatMessage]) -> TemplateOptions:
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
        continue_final=_continues(fields, messages),
    )


def _continues(fields: Fields, messages: Sequence[ChatMessage]) -> bool:
    """Read continue_final_message (vLLM): the answer goes on with the last message and does not repeat it."""
    if not fields.boolean("continue_final_message", False):
        if not fields.boolean("add_generation_prompt", True):
            raise fields.error("add_generation_prompt", "must be true, or continue_final_message must be")
        return False
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise fields.error(
            "continue_final_message", "needs a last message of the assistant, without tool_calls"
        )
    return True


def _parse_thinking_budget(fields: Fields, kwargs: Fields) -> int | None:
    """Read it by the names of vLLM, Qwen, Anthropic and Z.ai; the first that is given wins."""
    thinking = fields.raw("thinking")
    sources = [(fields, "thinking_token_budget"), (fields, "thinking_budget"), (kwargs, "thinking_budget")]
    if isinstance(thinking, dict):
        sources.append((Fields(thinking, "thinking"), "budget_tokens"))
    for source, name in sources:
        budget = source.integer(name)
        if budget is not None and budget < 0:
            raise source.error(name, "must be 0 or more")
        if budget is not None:
            return budget
    return None


def parse_sampling(
    fields: Fields,
    defaults: SamplingParams,
    num_logprobs: int | None,
    names: Mapping[str, str] = {},  # read only
    logprob_token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """Take the defaults, then what the client gave; SamplingParams checks the ranges.

    names: the protocol's names for ours, where they differ. Raises InvalidRequest naming the field.
    """
    try:
        sampling = replace(_read_sampling(fields, defaults, names), num_logprobs=num_logprobs)
        return replace(sampling, logprob_token_ids=logprob_token_ids)
    except InvalidRequest as error:
        if error.param is None or error.param.startswith(fields.path):
            raise
        own = fields.path_of(names.get(error.param, error.param))  # a range, told under our name
        raise InvalidRequest(error.message.replace(error.param, own, 1), param=own) from error


def _read_sampling(fields: Fields, defaults: SamplingParams, names: Mapping[str, str]) -> SamplingParams:
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
        whole = fields.integer(names.get(name, name))
        if whole is not None:
            given[name] = max(whole, 0) if name == "top_k" and whole == -1 else whole
    return replace(
        defaults,
        **given,
        logit_bias=parse_logit_bias(fields),
        stop_token_ids=parse_ids(fields, "stop_token_ids"),
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


def parse_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
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


def parse_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids: Sequence[object] = fields.list(name)
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in ids):
        raise fields.error(name, "must be a list of token ids")
    return tuple(entry for entry in ids if isinstance(entry, int))


def _parse_max_tokens(fields: Fields) -> int | None:
    """The newer name wins where a client sends both."""
    newer = ranged(fields, "max_completion_tokens", 1, None)
    older = ranged(fields, "max_tokens", 1, None)
    return older if newer is None else newer


def parse_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fields.error("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    for at, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            path = fields.path_of("stop" if isinstance(value, str) else f"stop[{at}]")
            raise invalid(path, f"must be a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def parse_stream_options(fields: Fields) -> StreamOptions:
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions()
    continuous = options.boolean("continuous_usage_stats", False)
    return StreamOptions(options.boolean("include_usage", False), continuous)


def ranged(fields: Fields, name: str, low: int, high: int | None) -> int | None:
    value = fields.integer(name)
    if value is not None and (value < low or (high is not None and value > high)):
        limit = f"between {low} and {high}" if high is not None else f"{low} or more"
        raise fields.error(name, f"must be {limit}")
    return value
