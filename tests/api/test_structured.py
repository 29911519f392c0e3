"""Constrained answers and forced calls, from the body to the parsed answer, over random logits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.api.harness import Answer, Client, make_server, serving

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
RANDOM = {"temperature": 1.0, "max_tokens": 700}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "tall": {"type": "boolean"}},
    "required": ["age", "tall"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"$ref": "#/$defs/Unit"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "exact": {"type": "number"},
            "where": {
                "type": "object",
                "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}},
                "required": ["lat"],
                "additionalProperties": False,
            },
            "note": {"anyOf": [{"type": "string", "enum": ["a b", "ü"]}, {"type": "null"}]},
        },
        "required": ["city", "unit", "days", "where"],
        "$defs": {"Unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
SAY = {"name": "say", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


def tools_of(*functions: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


def ask(**fields: Any) -> Answer:
    """One request to an application of its own."""

    async def run() -> Answer:
        server = make_server(max_context_tokens=4096)
        async with serving(server) as client:
            answer = await client.chat(**fields)
            server.check_idle()
            return answer

    return asyncio.run(run())


def ask_many(seeds: range, **fields: Any) -> list[Any]:
    """The choices of the same request with many seeds."""

    async def run() -> list[Any]:
        server = make_server(max_context_tokens=4096)
        async with serving(server) as client:
            answers = [await client.chat(f"r{seed}", seed=seed, **fields) for seed in seeds]
            assert all(answer.status == 200 for answer in answers), answers[0].body
            return [answer.json()["choices"][0] for answer in answers]

    return asyncio.run(run())


def schema_format(schema: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **extra}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format(PERSON)},
        {"response_format": schema_format(PERSON, strict=True)},
        {"response_format": schema_format({**PERSON, "not": {"const": 1}}, strict=False)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"json_schema": json.dumps(PERSON)},
        {"json_schema": PERSON},
    ],
)
def test_every_spelling_of_a_schema_gives_json_of_it(fields: dict[str, Any]) -> None:
    for choice in ask_many(range(4), **fields, **RANDOM, **NO_THINKING):
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"age", "tall"}
        assert isinstance(value["tall"], bool)
        assert 0 <= value["age"] <= 150
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-[xyz]"}}, r"\d{3}-[xyz]"),
        ({"guided_regex": "a/b[0-9]"}, "a/b[0-9]"),
        ({"regex": "[ab]{4}"}, "[ab]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no way", '"é"\n']}}, 'yes|no way|"é"\n'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/ "b"'}}, "a[0-9]b"),
        ({"guided_grammar": 'root ::= "x" [0-9] | "y"'}, "x[0-9]|y"),
        ({"ebnf": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
    ],
)
def test_regex_choice_and_grammar_hold(fields: dict[str, Any], pattern: str) -> None:
    for choice in ask_many(range(4), **fields, **RANDOM, **NO_THINKING):
        assert re.fullmatch(pattern, choice["message"]["content"], re.ASCII), choice


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_object_begins_an_object(fields: dict[str, Any]) -> None:
    for choice in ask_many(range(4), **fields, temperature=1.0, max_tokens=40, **NO_THINKING):
        content = choice["message"]["content"]
        assert content.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(content), dict)


def test_reasoning_comes_first_and_is_free() -> None:
    fields = {"response_format": schema_format(PERSON), "thinking_budget": 9, **RANDOM}
    for choice in ask_many(range(6), **fields):
        assert json.loads(choice["message"]["content"]).keys() == {"age", "tall"}
        assert not choice["message"].get("tool_calls")
    assert any(choice["message"].get("reasoning_content") for choice in ask_many(range(6), **fields))


def test_a_stream_says_the_same_as_the_whole_answer() -> None:
    fields = {"response_format": schema_format(PERSON), "seed": 3, **RANDOM, **NO_THINKING}
    events = ask(stream=True, **fields).events()
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])
    assert text == ask(**fields).json()["choices"][0]["message"]["content"]


def test_an_answer_that_does_not_fit_ends_with_length() -> None:
    choice = ask(guided_regex="a{100}", max_tokens=10, **NO_THINKING).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert re.fullmatch("a{1,20}", choice["message"]["content"])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "needle"),
    [
        (
            {"response_format": schema_format({"type": "strin"})},
            "response_format.json_schema.schema",
            "strin",
        ),
        ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema", "not"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema", "object"),  # type: ignore[arg-type]
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", "foo"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "strings"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "tools"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"ebnf": "root ::= ("}, "ebnf", "GBNF"),
        ({"regex": "a", "guided_choice": ["a"]}, "regex", "guided_choice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "always", "tools": tools_of(CLOCK)}, "tool_choice", "must be"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": tools_of(CLOCK)},
            "tool_choice.function.name",
            "one of the tools",
        ),
        (
            {
                "tool_choice": "required",
                "tools": tools_of(
                    {
                        "name": "f",
                        "parameters": {"properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}},
                    }
                ),
            },
            "tool_choice",
            "nsatisfiable",
        ),
        ({"thinking_budget": -1}, "thinking_budget", "0 or more"),
    ],
)
def test_what_cannot_be_compiled_is_a_400_before_any_stream(
    fields: dict[str, Any], param: str, needle: str, is_stream: bool
) -> None:
    answer = ask(stream=is_stream, **fields)
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert needle in error["message"]


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert {"city", "unit", "days", "where"} <= value.keys() <= WEATHER["parameters"]["properties"].keys()  # type: ignore[index]
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 12
    assert value["unit"] in ("celsius", "fahrenheit")
    assert 1 <= value["days"] <= 14
    assert -90 <= value["where"]["lat"] <= 90
    assert isinstance(value.get("exact", 0), int | float)
    assert value.get("note") in ("a b", "ü", None)


def test_a_required_call_is_always_a_call_of_a_declared_tool() -> None:
    seen = set()
    fields = {"tools": tools_of(WEATHER, CLOCK), "tool_choice": "required", **RANDOM}
    for choice in ask_many(range(24), thinking_budget=5, **fields):
        calls = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        for call in calls:
            seen.add(call["function"]["name"])
            if call["function"]["name"] == "clock":
                assert call["function"]["arguments"] == "{}"
            else:
                check_weather(call["function"]["arguments"])
    assert seen == {"get_weather", "clock"}


def test_a_named_call_is_one_call_of_that_tool() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"tools": tools_of(CLOCK, WEATHER), "tool_choice": named, **RANDOM, **NO_THINKING}
    for choice in ask_many(range(12), **fields):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        check_weather(call["function"]["arguments"])


def test_without_parallel_calls_one_required_call_comes() -> None:
    fields = {"tools": tools_of(CLOCK), "tool_choice": "required", "parallel_tool_calls": False}
    for choice in ask_many(range(12), **fields, **RANDOM, **NO_THINKING):
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"


def test_with_parallel_calls_several_may_come() -> None:
    fields = {"tools": tools_of(CLOCK), "tool_choice": "required"}
    counts = {len(c["message"]["tool_calls"]) for c in ask_many(range(16), **fields, **RANDOM, **NO_THINKING)}
    assert max(counts) > 1


def test_a_required_call_that_does_not_fit_ends_with_length_and_no_half_call() -> None:
    fields = {"tools": tools_of(SAY), "tool_choice": "required", "max_tokens": 3, **NO_THINKING}
    choice = ask(**fields).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert not choice["message"].get("tool_calls")


async def script_and_ask(client: Client, text: str, **fields: Any) -> Any:
    client.server.script("r", text, end="<|observation|>")
    answer = await client.chat("r", **fields, **NO_THINKING, max_tokens=400)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def ask_scripted(text: str, **fields: Any) -> Any:
    async def run() -> Any:
        async with serving(make_server(max_context_tokens=4096)) as client:
            return await script_and_ask(client, text, **fields)

    return asyncio.run(run())


STRICT = {**WEATHER, "strict": True}
GOOD = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>unit</arg_key><arg_value>"
    "celsius</arg_value><arg_key>days</arg_key><arg_value>3</arg_value><arg_key>where</arg_key><arg_value>"
    '{"lat": 59}</arg_value></tool_call>'
)


def test_a_strict_tool_leaves_text_and_good_calls_as_they_are() -> None:
    choice = ask_scripted(f"Let me see.{GOOD}", tools=tools_of(STRICT))
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {
        "city": "Oslo",
        "unit": "celsius",
        "days": 3,
        "where": {"lat": 59},
    }


def test_a_strict_tool_bends_a_bad_call() -> None:
    choice = ask_scripted(GOOD.replace("celsius", "kelvins"), tools=tools_of(STRICT))
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["unit"] in ("celsius", "fahrenheit")


def test_a_tool_that_is_not_strict_is_free_beside_a_strict_one() -> None:
    text = "<tool_call>say<arg_key>volume</arg_key><arg_value>11</arg_value></tool_call>"
    choice = ask_scripted(text, tools=tools_of(STRICT, SAY))
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"volume": 11}


@pytest.mark.parametrize(
    "answer_format",
    [
        {"response_format": schema_format(PERSON)},
        {"guided_regex": r'\{"age": \d, "tall": true\}'},
        {"guided_grammar": 'start: call\ncall: "{\\"age\\": 4, \\"tall\\": true}"'},
    ],
)
@pytest.mark.parametrize("text", ['{"age": 4, "tall": true}', GOOD])
def test_with_tools_a_format_binds_the_answer_and_calls_stay_possible(
    answer_format: dict[str, Any], text: str
) -> None:
    choice = ask_scripted(text, tools=tools_of(WEATHER), **answer_format)
    if text == GOOD:
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    else:
        assert json.loads(choice["message"]["content"]) == {"age": 4, "tall": True}


def test_a_budget_ends_reasoning_and_is_counted() -> None:
    for budget in (0, 7):
        body = ask(thinking_budget=budget, max_tokens=30, temperature=1.0, seed=1).json()
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 1
        assert "content" in body["choices"][0]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 3},
        {"thinking_token_budget": 3},
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
        {"chat_template_kwargs": {"thinking_budget": 3}},
    ],
)
def test_every_spelling_of_a_budget_counts(fields: dict[str, Any]) -> None:
    body = ask(max_tokens=30, temperature=1.0, seed=2, **fields).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4


def test_a_raw_completion_can_be_bound_too() -> None:
    async def run() -> Answer:
        async with serving(make_server(max_context_tokens=4096)) as client:
            body = {"prompt": "Age: ", "guided_regex": "[0-9]{2}", "temperature": 1.0, "n": 3}
            return await client.open("POST", "/v1/completions", json.dumps(body).encode()).answer()

    for choice in asyncio.run(run()).json()["choices"]:
        assert re.fullmatch("[0-9]{2}", choice["text"])


def test_a_continued_message_is_not_repeated_and_stays_bound() -> None:
    messages = [{"role": "user", "content": "Pick."}, {"role": "assistant", "content": '{"age": '}]
    choice = ask(
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=False,
        guided_regex=r'[0-9]{2}, "tall": true\}',
        **RANDOM,
    ).json()["choices"][0]
    assert json.loads('{"age": ' + choice["message"]["content"])["tall"] is True
    assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize(
    "last",
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
)
def test_only_text_of_the_assistant_can_be_continued(last: dict[str, Any]) -> None:
    answer = ask(messages=[{"role": "user", "content": "x"}, last], continue_final_message=True)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json_schema": json.dumps(PERSON)}, r"\{.*\}"),
        ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"ebnf": 'root ::= "x" [0-9]'}, "x[0-9]"),
    ],
)
def test_sglangs_fields_bind_generate(fields: dict[str, Any], pattern: str) -> None:
    async def run() -> list[Any]:
        async with serving(make_server(max_context_tokens=4096)) as client:
            body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 700, **fields}}
            answer = await client.open("POST", "/generate", json.dumps(body).encode()).answer()
            assert answer.status == 200, answer.body
            wrong = {"text": "a", "sampling_params": {"regex": "(a"}}
            refused = await client.open("POST", "/generate", json.dumps(wrong).encode()).answer()
            assert refused.status == 400
            return list(answer.json())

    for output in asyncio.run(run()):
        assert re.fullmatch(pattern, output["text"], re.DOTALL), output
