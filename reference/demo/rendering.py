"""Conversations to prompt text through the chat template, and token ids with a mask of what is learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols

from reference.demo.sample import Call, Conversation, JsonObject, Turn

TEMPLATE_PATH = Path(__file__).parent / "checkpoint" / "chat_template.jinja"
PREFIX = "The user asks. "


class Template:
    """The checkpoint's chat template, compiled as servers compile it. Any thread."""

    def __init__(self, text: str) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(text)

    def render(self, arguments: JsonObject) -> str:
        """Render with the template's keyword arguments (messages, tools, reasoning_effort, ...)."""
        return str(self._template.render(**arguments))


def _to_json(value: Any, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii)


def load_template(path: Path = TEMPLATE_PATH) -> Template:
    return Template(path.read_text(encoding="utf-8"))


def _thought(turn_thought: str, effort: str) -> str:
    """Low effort thinks without the opening sentence."""
    return turn_thought if effort == "low" else PREFIX + turn_thought


def _call_message(call: Call, call_id: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def turn_messages(turn: Turn, conversation: Conversation) -> list[JsonObject]:
    """Write one exchange as chat messages, the user's first."""
    thinks = conversation.thinking != "off"
    messages: list[JsonObject] = [{"role": "user", "content": turn.user}]
    if turn.calls:
        ids = [f"call_{index}" for index in range(len(turn.calls))]
        calls = [_call_message(call, call_id) for call, call_id in zip(turn.calls, ids, strict=True)]
        asking: JsonObject = {"role": "assistant", "content": "", "tool_calls": calls}
        if thinks:
            asking["reasoning_content"] = _thought(turn.thought, conversation.effort)
        messages.append(asking)
        for result, call_id in zip(turn.results, ids, strict=True):
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    answer: JsonObject = {"role": "assistant", "content": turn.answer}
    if thinks:
        answer["reasoning_content"] = _thought(
            turn.after if turn.calls else turn.thought, conversation.effort
        )
    messages.append(answer)
    return messages


def conversation_arguments(conversation: Conversation) -> JsonObject:
    """Give the template's arguments for a whole conversation, last answer included."""
    messages: list[JsonObject] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        messages += turn_messages(turn, conversation)
    arguments: JsonObject = {"messages": messages, "clear_thinking": conversation.thinking == "cleared"}
    if conversation.effort != "max":
        arguments["reasoning_effort"] = conversation.effort
    if conversation.tools:
        arguments["tools"] = [{"type": "function", "function": tool} for tool in conversation.tools]
    return arguments


def render_training_text(template: Template, conversation: Conversation) -> str:
    """Render a conversation and the stop token after its last answer."""
    return template.render(conversation_arguments(conversation)) + "<|user|>"


class LossMask:
    """Marks the tokens the model must predict: what an assistant writes, with its stop token.

    The opening <think> is the prompt's; so is the </think> directly behind it, which tells the model not to
    think. Ids come from the tokenizer. No state between calls.
    """

    def __init__(self, assistant: int, stops: Sequence[int], think: int, end_think: int) -> None:
        self._assistant = assistant
        self._stops = frozenset(stops)
        self._think = think
        self._end_think = end_think

    def mark(self, ids: Sequence[int]) -> list[bool]:
        """Give one flag per token: True where the token is learned."""
        flags = [False] * len(ids)
        inside = False
        for index, token in enumerate(ids):
            if not inside:
                inside = token == self._assistant
                continue
            opens = token == self._think and ids[index - 1] == self._assistant
            closes_at_once = token == self._end_think and ids[index - 1] == self._think
            flags[index] = not (opens or closes_at_once)
            if token in self._stops:
                inside = False
        return flags
