"""Tool calls as a grammar over GLM's call format, so that a forced call always parses.

    forced    call+            one call if only one may come                    tool_choice required, named
    free      TEXT? (call TEXT?)*                                               tools with strict: true
    answer    the answer's own constraint, or calls                             tools and response_format

    call      <tool_call> name (<arg_key> key </arg_key> <arg_value> value </arg_value>)* </tool_call>

The markers are token ids, so text cannot spell them. Declared arguments come in the order of the schema's
properties, required ones always. A value that may be a string is raw text, as the model writes it, held to
enum, const, length and an anchored pattern; any other value is JSON of its schema. A tool without declared
arguments takes none, unless it says additionalProperties; one whose schema is put together (anyOf, $ref) at
its root takes any. A tool that is not strict ignores keywords that cannot be enforced, and where its call
is not forced its arguments are free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm53srv.api.constraints import OutputFormat, json_options, lark_body, lark_regex, lark_text
from glm53srv.api.markers import Marker
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.api.tool_types import declared_types, resolve_reference
from glm53srv.api.wire import invalid
from glm53srv.request import Constraint

Function = Mapping[str, Any]

TERMINALS = r"""
TEXT: /(.|\n)+/
RAW: /(.|\n)*/
KEY: /[^\s<>]([^<>\n]*[^\s<>])?/
NUMBER: /-?(0|[1-9][0-9]{0,199})(\.[0-9]{1,200})?([eE][+-]?[0-9]{1,2})?/
"""
"""NUMBER is bounded so that a double can hold it; what overflows one would be taken for text."""

ANCHORED = re.compile(r"\^([^|^$]*)\$")
"""Patterns that say what the whole text is; others are searched for in it, and bind nothing here."""

MAX_DEPTH = 8
"""Steps through $ref and anyOf for one value; a schema that loops ends there."""

BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
MAX_LENGTH = 100_000
"""Length bounds beyond this are left to the tool."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls must come. required: one at least. name: of this tool alone."""

    required: bool = False
    name: str | None = None


def tool_format(
    functions: Sequence[Function],
    choice: ToolChoice,
    answer: OutputFormat | None,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
) -> OutputFormat | None:
    """Give the constraint of a request with tools; None if it binds nothing.

    functions: bare function objects. answer: what the answer must match where there is no call. parallel:
    more than one call may come. Raises InvalidRequest for an argument name that a call cannot carry.
    """
    if choice.name is not None:
        functions = [function for function in functions if function["name"] == choice.name]
    is_forced = choice.required or choice.name is not None
    if not functions or not (is_forced or answer or any(function.get("strict") for function in functions)):
        return answer
    calls = _CallRules(tokenizer).calls(functions, all_typed=is_forced)
    if is_forced:
        is_single = choice.name is not None or not parallel
        lines = [f"start: {'call' if is_single else 'call+'}"]
        return OutputFormat(Constraint("lark", _join(lines, calls)), "tool_choice")
    if answer is None:
        return OutputFormat(Constraint("lark", _join(["start: TEXT? (call TEXT?)*"], calls)), "tools")
    return OutputFormat(_answer_or_calls(answer.constraint, calls), answer.param)


def _answer_or_calls(answer: Constraint, calls: Sequence[str]) -> Constraint:
    if answer.kind in ("json_schema", "regex"):
        lines = ["start: answer | call+", f"answer: {lark_body(answer)}"]
        return Constraint("lark", _join(lines, calls))
    # A Lark text has rules of its own, whose names may be ours: it stays a grammar by itself.
    parts = (("calls", _join(["start: @answer | call+"], calls)), ("answer", answer.text))
    grammars = [{"name": name, "lark_grammar": text} for name, text in parts]
    return Constraint("llguidance", json.dumps({"grammars": grammars}))


def _join(lines: Sequence[str], calls: Sequence[str]) -> str:
    return "\n".join((*lines, *calls)) + TERMINALS


class _CallRules:
    """Writes Lark rules; the rule of tool i is tool_i, that of its argument j arg_i_j."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._markers = {marker: f"<[{token_id}]>" for token_id, marker in tokenizer.markers.items()}

    def calls(self, functions: Sequence[Function], *, all_typed: bool) -> list[str]:
        """Give the rule `call` and those below it. all_typed: also tools that are not strict are held."""
        tools = " | ".join(f"tool_{at}" for at in range(len(functions)))
        begin, end = self._markers[Marker.TOOL_CALL], self._markers[Marker.TOOL_CALL_END]
        lines = [f"call: {begin} ({tools}) {end}", f"any_arg: {self._argument('KEY', 'RAW')}"]
        for at, function in enumerate(functions):
            lines += self._tool(at, function, is_typed=all_typed or bool(function.get("strict")))
        return lines

    def _tool(self, at: int, function: Function, *, is_typed: bool) -> list[str]:
        name = lark_text(function["name"])
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties")
        if not is_typed:
            return [f"tool_{at}: {name} any_arg*"]
        if not isinstance(properties, Mapping) or not properties:
            return [f"tool_{at}: {name}{' any_arg*' if _takes_any(parameters) else ''}"]
        required = parameters.get("required")
        required = required if isinstance(required, list) else []
        lines, arguments = [], []
        for index, (key, schema) in enumerate(properties.items()):
            if not key or key != key.strip():
                raise invalid(
                    "tools", f"have an argument {key!r} of {function['name']}, which no call can carry"
                )
            rule = f"arg_{at}_{index}"
            value = _value(schema, parameters, lenient=not function.get("strict"))
            lines.append(f"{rule}: {self._argument(lark_text(key), f'{rule}_v')}")
            lines.append(f"{rule}_v: {value}")
            arguments.append(rule if key in required else f"{rule}?")
        return [f"tool_{at}: {' '.join((name, *arguments))}", *lines]

    def _argument(self, key: str, value: str) -> str:
        marker = self._markers
        return (
            f"{marker[Marker.ARG_KEY]} {key} {marker[Marker.ARG_KEY_END]} "
            f"{marker[Marker.ARG_VALUE]} {value} {marker[Marker.ARG_VALUE_END]}"
        )


def _takes_any(parameters: Function) -> bool:
    """Tell whether a schema without properties lets arguments through."""
    extra = parameters.get("additionalProperties", False)
    return extra is not False or any(word in parameters for word in ("$ref", "anyOf", "oneOf", "allOf"))


def _value(schema: object, root: Function, *, lenient: bool, depth: int = 0) -> str:
    """Write what may stand between <arg_value> and </arg_value>, as the body of a rule."""
    types = declared_types(schema, root)
    if not isinstance(schema, Mapping) or not types or depth > MAX_DEPTH:
        return "RAW"
    fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(fixed, list) and fixed:
        return " | ".join(lark_text(v if isinstance(v, str) else json.dumps(v)) for v in fixed)
    branches = _branches(schema, root)
    if branches:
        values = (_value(branch, root, lenient=lenient, depth=depth + 1) for branch in branches)
        return " | ".join(dict.fromkeys(values))
    if "string" in types:
        return _raw_text(schema) if types == {"string"} else "RAW"
    if types == {"number"} and not schema.keys() & BOUNDS:
        return "NUMBER"
    shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return "%json " + json.dumps({**shared, **schema, "x-guidance": json_options(lenient=lenient)})


def _branches(schema: Function, root: Function) -> Sequence[object]:
    """Give the schemas of which one holds: behind $ref, in anyOf, oneOf, or the only one of allOf."""
    if isinstance(schema.get("$ref"), str):
        return [resolve_reference(schema["$ref"], root)]
    for keyword in ("anyOf", "oneOf", "allOf"):
        found = schema.get(keyword)
        if isinstance(found, list) and (keyword != "allOf" or len(found) == 1):
            return found
    return ()


def _raw_text(schema: Function) -> str:
    pattern = schema.get("pattern")
    whole = ANCHORED.fullmatch(pattern) if isinstance(pattern, str) else None
    if whole is not None:
        return lark_regex(whole[1]) if whole[1] else '""'
    low, high = (_length(schema.get(word)) for word in ("minLength", "maxLength"))
    if low is None and high is None:
        return "RAW"
    return rf"/(.|\n){{{low or 0},{'' if high is None else high}}}/"


def _length(bound: object) -> int | None:
    is_bound = isinstance(bound, int) and not isinstance(bound, bool) and 0 <= bound <= MAX_LENGTH
    return int(str(bound)) if is_bound else None
