"""What a request asks of the form of its answer, in every spelling that clients use, as one Constraint.

    field                                                  spelled by   becomes
    response_format {type: json_object}                    OpenAI       any JSON object
    response_format {type: json_schema, ...}               OpenAI       JSON schema
    structured_outputs {json, json_object, regex,          vLLM         JSON schema, any object, regex,
      choice or grammar}                                                alternatives, grammar
    guided_json, guided_regex, guided_choice,              older vLLM   the same
      guided_grammar
    json_schema, regex, ebnf                               SGLang       JSON schema, regex, grammar
    json_schema, grammar                                   llama.cpp    JSON schema, grammar

A grammar is Lark as llguidance reads it, or GBNF (rules with ::=). A regular expression matches the whole
answer. A JSON schema with a keyword that cannot be enforced is refused, unless json_schema says strict:
false; then such keywords bind nothing. White space between JSON tokens is bounded, or a model could write it
for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from glm53srv.api.markers import Marker
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.api.wire import MAX_JSON_DEPTH, Fields, is_too_deep
from glm53srv.errors import GrammarError, InvalidRequest
from glm53srv.request import Constraint, OpenReasoning, SamplingParams

if TYPE_CHECKING:  # numpy: not before the port is open
    from glm53srv.engine.grammar import GrammarCompiler

JSON_SPACE = r"[ \n\t]{0,64}"
"""Between JSON tokens: room for the indentation of pretty-printed output, and an end."""

MAX_CHOICES = 1024
MAX_GRAMMAR_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A constraint and the field that asked for it, for the error if it does not compile."""

    constraint: Constraint
    param: str


def parse_output_format(fields: Fields) -> OutputFormat | None:
    """Read the one constraint that the fields of a body, or SGLang's sampling_params, ask for.

    Raises InvalidRequest naming the field; for several constraints the second one.
    """
    found: list[OutputFormat] = []
    for read in (_read_response_format, _read_structured_outputs, _read_flat_fields):
        found += read(fields)
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[1].param} cannot be combined with {found[0].param}; send one of them",
            param=found[1].param,
        )
    return found[0] if found else None


def check_output_format(wanted: OutputFormat, grammars: GrammarCompiler | None) -> None:
    """Compile the constraint, up to a second for extreme ones: for a text thread.

    Raises InvalidRequest with the compiler's reason.
    """
    if grammars is None:
        raise InvalidRequest(
            f"{wanted.param} is not supported: this server runs without grammars", param=wanted.param
        )
    try:
        grammars.check(wanted.constraint)
    except GrammarError as error:
        raise InvalidRequest(f"{wanted.param} cannot be used: {error}", param=wanted.param) from error


def constrain(
    sampling: SamplingParams,
    wanted: OutputFormat | None,
    tokenizer: Tokenizer,
    *,
    in_reasoning: bool,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """Add a constraint and a thinking budget to sampling parameters.

    in_reasoning: the prompt ends inside reasoning, so the constraint waits for its end.
    """
    if wanted is None and thinking_budget is None:
        return sampling
    reasoning = None
    if in_reasoning:
        ids = {marker: token_id for token_id, marker in tokenizer.markers.items()}
        reasoning = OpenReasoning(ids[Marker.THINK_END], (ids[Marker.TOOL_CALL],), thinking_budget)
    constraint = None if wanted is None else wanted.constraint
    return replace(sampling, constraint=constraint, reasoning=reasoning)


def json_options(*, lenient: bool) -> dict[str, Any]:
    """Give what a schema says to llguidance (key x-guidance). lenient: ignore what cannot be enforced."""
    return {"whitespace_pattern": JSON_SPACE, "lenient": lenient}


def schema_constraint(schema: Mapping[str, Any], *, lenient: bool = False) -> Constraint:
    """Make the constraint of a JSON schema."""
    return Constraint("json_schema", json.dumps({**schema, "x-guidance": json_options(lenient=lenient)}))


def lark_body(constraint: Constraint) -> str:
    """Write a JSON schema or a regex as it stands inside a Lark rule."""
    if constraint.kind == "json_schema":
        return f"%json {constraint.text}"
    assert constraint.kind == "regex", f"a {constraint.kind} has rules of its own"
    return lark_regex(constraint.text)


def _read_response_format(fields: Fields) -> list[OutputFormat]:
    wanted = fields.object("response_format")
    if wanted is None:
        return []
    match wanted.string("type"):
        case "text":
            return []
        case "json_object":
            return [OutputFormat(schema_constraint({"type": "object"}), "response_format")]
        case "json_schema":
            holder = wanted.object("json_schema")
            if holder is None:
                raise wanted.error("json_schema", "is required with type json_schema")
            lenient = not holder.boolean("strict", True)
            holder.string("name")
            return [_schema(holder, "schema", lenient=lenient)]
        case _:
            raise wanted.error("type", "must be text, json_object or json_schema")


def _read_structured_outputs(fields: Fields) -> list[OutputFormat]:
    wanted = fields.object("structured_outputs")
    if wanted is None:
        return []
    if wanted.has("structural_tag"):
        raise wanted.error("structural_tag", "is not supported; tool calls need tools and tool_choice")
    found = _read(wanted, {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar})
    if wanted.boolean("json_object", False):
        found.append(OutputFormat(schema_constraint({"type": "object"}), wanted.path_of("json_object")))
    if not found:
        raise fields.error("structured_outputs", "must hold json, json_object, regex, choice or grammar")
    return found


def _read_flat_fields(fields: Fields) -> list[OutputFormat]:
    if fields.has("structural_tag"):
        raise fields.error("structural_tag", "is not supported; tool calls need tools and tool_choice")
    readers = {
        "guided_json": _schema,
        "guided_regex": _regex,
        "guided_choice": _choice,
        "guided_grammar": _grammar,
        "json_schema": _schema,
        "regex": _regex,
        "ebnf": _grammar,
        "grammar": _grammar,
    }
    return _read(fields, readers)


Reader = Callable[[Fields, str], OutputFormat]


def _read(fields: Fields, readers: Mapping[str, Reader]) -> list[OutputFormat]:
    """Read the fields that are there; false and "" stand for absence in some clients."""
    return [read(fields, name) for name, read in readers.items() if fields.raw(name) not in (None, False, "")]


def _schema(fields: Fields, name: str, *, lenient: bool = False) -> OutputFormat:
    """Read a JSON schema, an object or (SGLang, vLLM) its text."""
    schema = fields.raw(name)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise fields.error(name, f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise fields.error(name, "must be a JSON schema object")
    if is_too_deep(schema):
        raise fields.error(name, f"is nested deeper than {MAX_JSON_DEPTH} levels")
    return OutputFormat(schema_constraint(schema, lenient=lenient), fields.path_of(name))


def _regex(fields: Fields, name: str) -> OutputFormat:
    return OutputFormat(Constraint("regex", _text(fields, name)), fields.path_of(name))


def _choice(fields: Fields, name: str) -> OutputFormat:
    choices = fields.list(name)
    if not 1 <= len(choices) <= MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):
        raise fields.error(name, f"must be a list of 1 to {MAX_CHOICES} strings that are not empty")
    rule = " | ".join(lark_text(choice) for choice in choices)
    return OutputFormat(Constraint("lark", f"start: {rule}"), fields.path_of(name))


def _grammar(fields: Fields, name: str) -> OutputFormat:
    from llguidance.gbnf_to_lark import any_to_lark  # 0.15 s: not before the port is open

    text = _text(fields, name)
    try:
        text = any_to_lark(text)
    except Exception as error:  # the converter raises bare Exception for every fault of the text
        raise fields.error(name, f"cannot be read as GBNF: {error}") from error
    return OutputFormat(Constraint("lark", text), fields.path_of(name))


def _text(fields: Fields, name: str) -> str:
    text = fields.string(name) or ""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise fields.error(name, f"must have at most {MAX_GRAMMAR_CHARS} characters")
    return text


def lark_text(text: str) -> str:
    """Quote text for a Lark rule, whose strings are JSON's, ASCII alone."""
    return json.dumps(text)


def lark_regex(regex: str) -> str:
    """Write a regular expression as a Lark terminal."""
    from llguidance import regex_to_lark  # 0.15 s: not before the port is open

    return f"/{regex_to_lark(regex, 'd')}/"
