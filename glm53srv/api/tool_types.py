"""What a tool's schema says about its arguments, and how a value on the wire becomes JSON.

The model writes values without types. Rules, by declared type:

    only string          the raw text, always
    other types          the text itself if it is strict JSON of a declared type, else a string
    nothing declared     the text itself if it is strict JSON of anything but a string, else a string

Strict JSON: no NaN or Infinity, no number that overflows a double, no leading zeros, no trailing text; white
space around it is dropped. A boolean is also taken in any letter case. The digits of a number are passed on
as written, never through a float.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

JSON_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
MAX_REFERENCES = 32
"""How many steps of $ref, anyOf, oneOf and allOf are followed; a schema that loops ends there."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """The declared arguments of one tool.

    types: per argument the JSON types it may have; an empty set where nothing is declared.
    """

    name: str
    types: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def types_of(self, argument: str) -> frozenset[str]:
        """Give the declared types of an argument; empty for an unknown one."""
        return self.types.get(argument, frozenset())


def tool_schema(function: Mapping[str, object]) -> ToolSchema:
    """Read a function object (`{"name": ..., "parameters": JSON schema}`); odd schemas declare nothing."""
    parameters = function.get("parameters")
    name = str(function.get("name", ""))
    if not isinstance(parameters, Mapping):
        return ToolSchema(name)
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return ToolSchema(name)
    return ToolSchema(name, {key: declared_types(schema, parameters) for key, schema in properties.items()})


def tool_schemas(functions: Sequence[Mapping[str, object]]) -> dict[str, ToolSchema]:
    """Read function objects, by name."""
    return {schema.name: schema for schema in map(tool_schema, functions)}


def declared_types(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """Collect the JSON types a schema admits.

    Reads type, nullable, enum, const, anyOf, oneOf, allOf and local $ref; empty when it says nothing.
    """
    found: set[str] = set()
    todo = [schema]
    for _ in range(MAX_REFERENCES):
        if not todo:
            break
        current = todo.pop()
        if not isinstance(current, Mapping):
            continue
        kinds = current.get("type")
        found.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in JSON_TYPES)
        if current.get("nullable") is True:
            found.add("null")
        enumerated = current.get("enum")
        if kinds is None and isinstance(enumerated, list):
            found.update(_type_of(value) for value in enumerated)
        if kinds is None and "const" in current:
            found.add(_type_of(current["const"]))
        for keyword in ("anyOf", "oneOf", "allOf"):
            branches = current.get(keyword)
            if isinstance(branches, list):
                todo.extend(branches)
        if isinstance(current.get("$ref"), str):
            todo.append(resolve_reference(str(current["$ref"]), root))
    return frozenset(found)


def is_text_only(types: frozenset[str]) -> bool:
    """Tell whether the value is text whatever it looks like, so that it can be streamed."""
    return types == {"string"}


def argument_json(raw: str, types: frozenset[str]) -> str:
    """Write the value `raw` as JSON by the rules at the head of this module."""
    if not is_text_only(types):
        literal = raw.strip(" \t\r\n")
        lowered = literal.lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered
        kinds = _strict_json_types(literal)
        if kinds and (kinds & types if types else "string" not in kinds):
            return literal
    return json.dumps(raw, ensure_ascii=False)


def _strict_json_types(literal: str) -> frozenset[str]:
    """Name the types of a strict JSON text; empty if it is none."""
    try:
        value = json.loads(
            literal, parse_float=_finite_float, parse_int=_whole_number, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError):
        return frozenset()
    kind = _type_of(value)
    is_whole = kind == "number" and isinstance(value, float) and value.is_integer()
    if kind == "integer" or is_whole:
        return frozenset(("integer", "number"))
    return frozenset((kind,))


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("overflows a double")
    return value


def _whole_number(_: str) -> int:
    return 0  # only the type matters, and converting thousands of digits is slow


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def resolve_reference(reference: str, root: Mapping[str, object]) -> object:
    """Follow a local JSON pointer (`#/$defs/Box`); None when it leads nowhere."""
    if not reference.startswith("#"):
        return None
    current: object = root
    for part in reference[1:].split("/")[1:]:
        if not isinstance(current, Mapping):
            return None
        current = current.get(part.replace("~1", "/").replace("~0", "~"))
    return current
