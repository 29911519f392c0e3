"""GLM-5.3's prompt, rendered by our own code.

Behaviour is that of the chat template of 4 September 2026 (upstream revision 690b7052) whatever file the
checkpoint ships, because the three revisions differ in what they lose and in the default of clear_thinking.
The result is a list of segments, so that only the template's own tokens become control tokens. Linear in the
size of the conversation.

    [gMASK]<sop><|system|>Reasoning Effort: Max          Low | High | Max, always first
    <|system|>\\n# Tools ...                              only with tools
    <|system|>text   <|user|>text
    <|assistant|><think>reasoning</think>content<tool_call>...</tool_call>
    <|observation|><tool_response>text</tool_response>... one block per run of tool messages
    <|assistant|><think>                                 generation prompt

Two departures. The template has no way to switch thinking off: with enable_thinking false the generation
prompt goes on with </think>, as other servers of this family do; the model was not trained on that for its
last turn, so quality drops. And it always begins a turn: with continue_final the prompt ends inside the last
message, in place of a generation prompt:

    content                   reasoning     the prompt ends in
    "" or none                given         <think>reasoning                      open: more reasoning comes
    <think>text, not closed   none          <think>text                           open: more reasoning comes
    any other                 any           <think>reasoning</think>content       more of the content comes

The end of what is continued is kept as it is, white space too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from glm53srv.api.tokenizer import Segment

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call of an earlier assistant turn. arguments: the parsed object, in its own key order."""

    name: str
    arguments: Mapping[str, object]
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn, reduced to what the template knows.

    content: text, "" for none. reasoning: None when the client sent none (it may then stand inline in the
    content as <think>...</think>). tool_call_id: of a tool message, the call it answers.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[PastCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request may choose about the prompt.

    reasoning_effort: "low", "high", or anything else for the maximum. clear_thinking: drop the reasoning of
    turns at or before the last user message. enable_thinking: False closes the think block in the prompt.
    continue_final: go on with the last message, of the assistant and without calls, and begin no turn.
    """

    reasoning_effort: str | None = None
    clear_thinking: bool = False
    enable_thinking: bool = True
    continue_final: bool = False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready to encode. ends_in_reasoning: it ends inside an open <think>."""

    segments: tuple[Segment, ...]
    ends_in_reasoning: bool

    @property
    def text(self) -> str:
        """The prompt as one string, for people and for tests."""
        return "".join(segment.text for segment in self.segments)

    @property
    def num_chars(self) -> int:
        """Its length; the measure of how long encoding will take."""
        return sum(len(segment.text) for segment in self.segments)


TOOLS_INTRODUCTION = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_FORMAT = (
    "</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML format:\n"
)


def render_chat(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, object]] = (),
    options: TemplateOptions = TemplateOptions(),
) -> RenderedPrompt:
    """Render a conversation up to the generation prompt.

    tools: bare function objects (`{"name": ..., "parameters": ...}`), keys in the client's order.
    """
    prompt = _PromptBuilder()
    prompt.control("[gMASK]", "<sop>", "<|system|>")
    prompt.text(f"Reasoning Effort: {_effort(options.reasoning_effort)}")
    if tools:
        _render_tools(prompt, tools)
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    position = 0
    continued = messages[-1] if options.continue_final else None
    if continued is not None:
        messages = messages[:-1]
    while position < len(messages):
        message = messages[position]
        if message.role == "tool":
            end = _end_of_tool_run(messages, position)
            calls = messages[position - 1].tool_calls if position > 0 else ()
            _render_results(prompt, messages[position:end], calls)
            position = end
            continue
        if message.role == "assistant":
            _render_assistant(prompt, message, not options.clear_thinking or position > last_user)
        else:
            prompt.control(f"<|{message.role}|>")
            prompt.text(message.content)
        position += 1
    prompt.control("<|assistant|>", "<think>")
    if continued is not None:
        is_open = _render_continued(prompt, continued)
        return RenderedPrompt(tuple(prompt.segments), ends_in_reasoning=is_open)
    if not options.enable_thinking:
        prompt.control("</think>")
    return RenderedPrompt(tuple(prompt.segments), ends_in_reasoning=options.enable_thinking)


@dataclass(slots=True)
class _PromptBuilder:
    segments: list[Segment] = field(default_factory=list)

    def control(self, *names: str) -> None:
        self.segments += [Segment(name, is_control=True) for name in names]

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text))


def _effort(effort: str | None) -> str:
    return effort.capitalize() if effort in ("low", "high") else "Max"


def _render_tools(prompt: _PromptBuilder, tools: Sequence[Mapping[str, object]]) -> None:
    """Render the tools' turn; the markers of its example call are real ones, as in the trained prompt."""
    lines = [_tool_line(tool) + "\n" for tool in tools if not tool.get("defer_loading")]
    prompt.control("<|system|>")
    prompt.text(TOOLS_INTRODUCTION + "".join(lines) + TOOLS_FORMAT)
    prompt.control("<tool_call>")
    prompt.text("{function-name}")
    for number in ("1", "2"):
        prompt.control("<arg_key>")
        prompt.text(f"{{arg-key-{number}}}")
        prompt.control("</arg_key>", "<arg_value>")
        prompt.text(f"{{arg-value-{number}}}")
        prompt.control("</arg_value>")
    prompt.text("...")
    prompt.control("</tool_call>")


def _tool_line(tool: Mapping[str, object]) -> str:
    shown = {key: value for key, value in tool.items() if key not in ("defer_loading", "strict")}
    return _to_json(shown)


def _to_json(value: object) -> str:
    """Format JSON as the template's tojson filter: separators ", " and ": ", nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False)


def _split_reasoning(message: ChatMessage) -> tuple[str | None, str]:
    """Give reasoning and content; a client that knows no field for reasoning sends it inline."""
    reasoning, content = message.reasoning, message.content
    if reasoning is None and "</think>" in content:
        reasoning = content.split("</think>", 1)[0].rsplit("<think>", 1)[-1]
        content = content.rsplit("</think>", 1)[-1]
    return reasoning, content


def _render_continued(prompt: _PromptBuilder, message: ChatMessage) -> bool:
    """Render the message to go on with, behind <think>; returns whether reasoning stays open."""
    reasoning, content = _split_reasoning(message)
    if reasoning is None and content.startswith("<think>"):
        reasoning, content = content.removeprefix("<think>"), ""
    prompt.text(reasoning or "")
    if reasoning and not content:
        return True
    prompt.control("</think>")
    prompt.text(content.lstrip())
    return False


def _render_assistant(prompt: _PromptBuilder, message: ChatMessage, keep_reasoning: bool) -> None:
    reasoning, content = _split_reasoning(message)
    prompt.control("<|assistant|>", "<think>")
    if keep_reasoning and reasoning is not None:
        prompt.text(reasoning)
    prompt.control("</think>")
    prompt.text(content.strip())
    for call in message.tool_calls:
        prompt.control("<tool_call>")
        prompt.text(call.name)
        for key, value in call.arguments.items():
            prompt.control("<arg_key>")
            prompt.text(key)
            prompt.control("</arg_key>", "<arg_value>")
            prompt.text(value if isinstance(value, str) else _to_json(value))
            prompt.control("</arg_value>")
        prompt.control("</tool_call>")


def _end_of_tool_run(messages: Sequence[ChatMessage], begin: int) -> int:
    end = begin
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return end


def _render_results(
    prompt: _PromptBuilder, results: Sequence[ChatMessage], calls: Sequence[PastCall]
) -> None:
    prompt.control("<|observation|>")
    for result in _in_order_of_calls(results, calls):
        prompt.control("<tool_response>")
        prompt.text(result.content)
        prompt.control("</tool_response>")


def _in_order_of_calls(results: Sequence[ChatMessage], calls: Sequence[PastCall]) -> Sequence[ChatMessage]:
    """Sort results like the calls they answer, if every id is there, unique, and known; else leave them."""
    call_ids = [call.call_id for call in calls]
    result_ids = [result.tool_call_id for result in results]
    if not calls or not all(call_ids) or not all(result_ids):
        return results
    if len(set(call_ids)) < len(call_ids) or len(set(result_ids)) < len(result_ids):
        return results
    by_id = {result.tool_call_id: result for result in results}
    if not set(by_id) <= set(call_ids):
        return results
    return [by_id[call_id] for call_id in call_ids if call_id in by_id]
