"""The OpenAPI document (version 3.1) of this server.

Paths come from the route table; the schemas of bodies stand here, and a test sends a wrong value for every
field in them. Unknown fields are allowed, as the server ignores them. Bounds are those the server checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm53srv.api.schema import EFFORTS, MAX_CHOICES, MAX_STOP_CHARS, MAX_STOPS
from glm53srv.request import MAX_LOGPROBS, MIN_REPETITION_PENALTY

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one endpoint.

    body: the schema of its JSON body, None for none. streams: it answers with events if asked to. answer:
    the content type of the whole answer.
    """

    summary: str
    body: str | None = None
    streams: bool = False
    answer: str = "application/json"


def openapi_document(operations: Sequence[tuple[str, str, Operation]], version: str) -> Schema:
    """Build the document. operations: method, path in the router's spelling, and what is there."""
    paths: dict[str, Schema] = {}
    for method, path, operation in operations:
        shown = openapi_path(path)
        entry = _operation(method, shown, operation)
        names = re.findall(r"\{(\w+)\}", shown)
        if names:
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(shown, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "glm53srv",
            "version": version,
            "description": "OpenAI-compatible server for GLM-5.3-Flash.",
        },
        "paths": paths,
        "components": {"schemas": {**_SCHEMAS, "Error": _ERROR}},
    }


def openapi_path(path: str) -> str:
    """Spell a path without the router's converters."""
    return re.sub(r":\w+\}", "}", path)


def _operation(method: str, path: str, operation: Operation) -> Schema:
    answers: Schema = {operation.answer: {}}
    if operation.streams:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"$ref": "#/components/schemas/Error"}
    failure: Schema = {"description": "An error", "content": {"application/json": {"schema": error}}}
    if path in ("/health", "/health/ready", "/ready"):  # they say how far loading is, not an error object
        failure = {"description": "Not ready", "content": {"application/json": {}}}
    entry: Schema = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', path.lower())}",
        "responses": {"200": {"description": "Success", "content": answers}, "default": failure},
    }
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body}"}
        entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return entry


def _or_null(schema: Schema) -> Schema:
    """null means "not given" everywhere."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None], "type": [schema["type"], "null"]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float, **bounds: Any) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, **bounds}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


_STRING: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_ID: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _ID, "minItems": 1}
_STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP: Schema = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOPS}]}

_SAMPLING: Schema = {
    "temperature": _number(0, 100),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_p": _number(0, 1),
    "top_k": _integer(-1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(MIN_REPETITION_PENALTY, 100),
    "stop": _STOP,
    "stop_token_ids": {"type": "array", "items": _ID},
    "ignore_eos": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _number(-100, 100),
    },
    "n": _integer(1, MAX_CHOICES),
}
_OPENAI: Schema = {
    "model": _STRING,
    **_SAMPLING,
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "min_tokens": _integer(0),
    "include_stop_str_in_output": _BOOLEAN,
    "stream": _BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {
            "include_usage": _or_null(_BOOLEAN),
            "continuous_usage_stats": _or_null(_BOOLEAN),
        },
    },
}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_JSON_SCHEMA: Schema = {"anyOf": [_STRING, {"type": "object"}]}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _STRING},
                    },
                },
            ]
        },
        "reasoning_content": _or_null(_STRING),
        "tool_calls": _or_null({"type": "array", "items": {"type": "object"}}),
        "tool_call_id": _or_null(_STRING),
    },
}
_FORMAT: Schema = {
    "response_format": {"type": "object", "properties": {"type": _or_null(_STRING)}},
    "structured_outputs": {"type": "object"},
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _STRING,
    "guided_choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    "guided_grammar": _STRING,
}
_CHAT_PROMPT: Schema = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": {"type": "array", "items": {"type": "object"}},
    "reasoning_effort": {"type": "string", "enum": list(EFFORTS)},
    "chat_template_kwargs": {"type": "object"},
}


def _body(properties: Schema, required: Sequence[str] = ()) -> Schema:
    shown = {name: schema if name in required else _or_null(schema) for name, schema in properties.items()}
    return {"type": "object", "properties": shown, "required": list(required)}


def _one_of(body: Schema, *names: str) -> Schema:
    """Demand exactly one of some members."""
    return {**body, "oneOf": [{"required": [name]} for name in names]}


_SCHEMAS: Schema = {
    "ChatCompletionRequest": _body(
        {
            **_CHAT_PROMPT,
            **_OPENAI,
            "max_tokens": _integer(1),
            "max_completion_tokens": _integer(1),
            "logprobs": _BOOLEAN,
            "top_logprobs": _integer(0, MAX_LOGPROBS),
            "parallel_tool_calls": _BOOLEAN,
            "tool_choice": {"anyOf": [_STRING, {"type": "object"}]},
            "thinking_budget": _integer(0),
            "continue_final_message": _BOOLEAN,
            **_FORMAT,
            "return_progress": _BOOLEAN,
        },
        ["messages"],
    ),
    "CompletionRequest": _body(
        {
            "prompt": _PROMPT,
            **_OPENAI,
            "max_tokens": _integer(0),
            "echo": _BOOLEAN,
            **_FORMAT,
            "logprobs": _integer(0, 5),
            "best_of": _integer(1, MAX_CHOICES),
        },
        ["prompt"],
    ),
    "GenerateRequest": _one_of(
        _body(
            {
                "text": {
                    "anyOf": [
                        {"type": "string", "minLength": 1},
                        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                    ]
                },
                "input_ids": {"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]},
                "sampling_params": {
                    "anyOf": [{"$ref": "#/components/schemas/SamplingParams"}, {"type": "array"}]
                },
                "rid": {"anyOf": [_STRING, {"type": "array", "items": _STRING}]},
                "stream": _BOOLEAN,
                "return_logprob": {"anyOf": [_BOOLEAN, {"type": "array", "items": _BOOLEAN}]},
                "logprob_start_len": {"anyOf": [_integer(-1), {"type": "array", "items": _integer(-1)}]},
                "top_logprobs_num": {
                    "anyOf": [
                        _integer(0, MAX_LOGPROBS),
                        {"type": "array", "items": _integer(0, MAX_LOGPROBS)},
                    ]
                },
                "token_ids_logprob": {"type": "array"},
                "return_text_in_logprobs": _BOOLEAN,
            }
        ),
        "text",
        "input_ids",
    ),
    "SamplingParams": _body(
        {
            **_SAMPLING,
            "max_new_tokens": _integer(0),
            "min_new_tokens": _integer(0),
            "sampling_seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
            "no_stop_trim": _BOOLEAN,
            "json_schema": _JSON_SCHEMA,
            "regex": _STRING,
            "ebnf": _STRING,
        }
    ),
    "TokenizeRequest": _one_of(
        _body(
            {
                "model": _STRING,
                "prompt": {"anyOf": [_STRING, {"type": "array", "items": _STRING, "minItems": 1}]},
                **_CHAT_PROMPT,
                "add_special_tokens": _BOOLEAN,
                "return_token_strs": _BOOLEAN,
            }
        ),
        "prompt",
        "messages",
    ),
    "DetokenizeRequest": _body(
        {
            "model": _STRING,
            "tokens": {
                "anyOf": [
                    {"type": "array", "items": _ID},
                    {"type": "array", "items": _IDS, "minItems": 1},
                ]
            },
            "skip_special_tokens": _BOOLEAN,
        },
        ["tokens"],
    ),
    "AbortRequest": _body({"rid": _STRING, "abort_all": _BOOLEAN}),
}

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": _or_null(_STRING),
                "code": _or_null(_STRING),
            },
        }
    },
}
