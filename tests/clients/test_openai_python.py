"""openai for Python: tools loops, the stream helper, parsed answers, raw responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.api.harness import MODEL
from tests.api.http_server import HttpServer
from tests.clients.weather import ANSWER, MAX_CONTEXT_TOKENS, QUESTION, TOOL, run_tool, script_turns, turn


def client_of(http: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tools_loop(is_stream: bool) -> None:
    with HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS) as http, client_of(http) as api:
        script_turns(http)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for number in (1, 2):
            request: dict[str, Any] = {
                "model": MODEL,
                "messages": messages,
                "tools": [TOOL],
                "extra_headers": turn(number),
            }
            if is_stream:
                with api.chat.completions.stream(**request) as stream:
                    choice: Any = stream.get_final_completion().choices[0]
            else:
                choice = api.chat.completions.create(**request).choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            for tool_call in choice.message.tool_calls or ():
                result = run_tool(tool_call.function.name, tool_call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
        assert messages[1]["content"] == "Let me look."
        assert messages[-1]["content"] == ANSWER
        assert choice.finish_reason == "stop"


class Trip(pydantic.BaseModel):
    """What a trip must be."""

    where: Literal["Oslo", "Rome"]
    nights: int = pydantic.Field(ge=1, le=9)
    quiet: bool


def test_a_parsed_answer_is_of_its_class() -> None:
    with HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS) as http, client_of(http) as api:
        for seed in range(4):
            answer = api.chat.completions.parse(
                model=MODEL,
                messages=[{"role": "user", "content": "Plan a trip."}],
                response_format=Trip,
                temperature=1.0,
                seed=seed,
                extra_body={"thinking_budget": 4},
            )
            trip = answer.choices[0].message.parsed
            assert isinstance(trip, Trip)


def test_a_forced_tool_of_a_class_is_parsed() -> None:
    tool = openai.pydantic_function_tool(Trip)
    with HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS) as http, client_of(http) as api:
        answer = api.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Plan a trip."}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.0,
            seed=3,
            extra_body={"thinking_budget": 4},
        )
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        (call,) = calls
        assert isinstance(call.function.parsed_arguments, Trip)


def test_async_streams_side_by_side() -> None:
    async def ask(api: openai.AsyncOpenAI, number: int) -> str:
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            stream=True,
            extra_headers={"x-request-id": f"s{number}"},
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run(http: HttpServer) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as api:
            return list(await asyncio.gather(*(ask(api, number) for number in range(6))))

    with HttpServer() as http:
        for number in range(6):
            http.server.script(f"s{number}", f"hm</think>number {number}", end="<|user|>")
        assert asyncio.run(run(http)) == [f"number {number}" for number in range(6)]


def test_a_raw_response_carries_the_request_id() -> None:
    with HttpServer() as http, client_of(http) as api:
        raw = api.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=2, extra_headers=turn(7)
        )
        assert raw.headers["x-request-id"] == "turn-7"
        assert raw.parse().choices[0].finish_reason == "length"
