"""OpenAI chat messages and tools to what the template renders.

What the template would lose without a word is repaired or refused here: developer becomes system, the
argument string of a past call is parsed, null content is "", `reasoning` is taken for `reasoning_content`,
input_text and output_text parts are text; unknown roles and media parts are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from glm53srv.api.chat_template import ChatMessage, PastCall, Role
from glm53srv.api.wire import MAX_JSON_DEPTH, Fields, UnsupportedContent, invalid, is_too_deep

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")

CALLABLE_NAME = re.compile(r"[^\s<>\"'`{}()\[\],;]{1,128}")
"""A function name that the output format can carry (rule R6 of the parser, see output_parser)."""


def parse_messages(body: Fields, name: str = "messages") -> tuple[ChatMessage, ...]:
    """Read the conversation. Raises InvalidRequest naming the field."""
    entries = body.list(name)
    if not entries:
        raise body.error(name, "must be a non-empty list")
    path = body.path_of(name)
    return tuple(_parse_message(Fields(entry, f"{path}[{at}]")) for at, entry in enumerate(entries))


def parse_tools(body: Fields, name: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Read tool definitions, nested under `function` or bare; gives the bare function objects.

    Raises InvalidRequest naming the field.
    """
    path = body.path_of(name)
    return tuple(_parse_tool(Fields(entry, f"{path}[{at}]")) for at, entry in enumerate(body.list(name)))


def _parse_message(fields: Fields) -> ChatMessage:
    wire_role = fields.string("role")
    role = ROLES.get(wire_role or "")
    if role is None:
        raise fields.error("role", f"must be one of {', '.join(ROLES)}")
    content = _parse_content(fields, allow_object=role == "tool")
    if role == "tool":
        return ChatMessage("tool", content, tool_call_id=fields.string("tool_call_id"))
    if role != "assistant":
        return ChatMessage(role, content)
    if fields.has("function_call"):
        raise fields.error("function_call", "is not supported; send tool_calls")
    reasoning = fields.string("reasoning_content")
    if reasoning is None:
        reasoning = fields.string("reasoning")
    calls_path = fields.path_of("tool_calls")
    calls = [_parse_call(Fields(c, f"{calls_path}[{at}]")) for at, c in enumerate(fields.list("tool_calls"))]
    return ChatMessage("assistant", content, reasoning, tuple(calls))


def _parse_content(fields: Fields, *, allow_object: bool) -> str:
    content = fields.raw("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict) and allow_object:
        if is_too_deep(content):
            raise fields.error("content", f"is nested deeper than {MAX_JSON_DEPTH} levels")
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list):
        raise fields.error("content", "must be a string or a list of parts")
    path = fields.path_of("content")
    return "".join(_parse_part(part, f"{path}[{at}]") for at, part in enumerate(content))


def _parse_part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    fields = Fields(part, path)
    kind = fields.string("type")
    if kind in TEXT_PARTS:
        text = fields.string("text")
        if text is None:
            raise fields.error("text", "is required in a text part")
        return text
    if kind == "refusal":
        return fields.string("refusal") or ""
    raise UnsupportedContent(f"unsupported content type: {kind}; this server reads text only", param=path)


def _parse_call(fields: Fields) -> PastCall:
    function = fields.object("function") or fields
    name = function.string("name")
    if not name:
        raise function.error("name", "is required")
    return PastCall(name, _parse_arguments(function), fields.string("id"))


def _parse_arguments(function: Fields) -> Mapping[str, object]:
    """OpenAI sends a JSON string, other clients the object; nothing at all means no arguments."""
    value = function.raw("arguments")
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            orjson.loads(value)  # the strict reader: no NaN, no lone surrogates, bounded depth
            value = json.loads(value)  # the exact one: whole numbers of any size
        except (ValueError, RecursionError) as error:
            raise function.error("arguments", "must be a JSON object written as a string") from error
    if not isinstance(value, dict):
        raise function.error("arguments", "must be a JSON object")
    if is_too_deep(value):
        raise function.error("arguments", f"is nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def _parse_tool(fields: Fields) -> Mapping[str, Any]:
    kind = fields.string("type")
    if kind not in (None, "function"):
        raise fields.error("type", "must be function; other kinds of tools are not served")
    nested = fields.object("function")
    function = nested or fields
    name = function.string("name")
    if name is None or not CALLABLE_NAME.fullmatch(name):
        raise function.error("name", "must be 1 to 128 characters without spaces, quotes or brackets")
    function.string("description")
    parameters = function.raw("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise function.error("parameters", "must be a JSON schema object")
    function.boolean("strict", False)
    function.boolean("defer_loading", False)
    bare = {key: value for key, value in function.items() if nested is not None or key != "type"}
    if is_too_deep(bare):
        raise invalid(function.path, f"is nested deeper than {MAX_JSON_DEPTH} levels")
    return bare
