"""litellm and langchain-openai; they are large, so they are no part of the environment: run when installed.

pip install litellm langchain-openai
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.harness import MODEL
from tests.api.http_server import HttpServer
from tests.clients.weather import (
    ANSWER,
    MAX_CONTEXT_TOKENS,
    QUESTION,
    TOOL,
    run_tool,
    script_turns,
    turn,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.mark.parametrize("is_stream", [False, True])
def test_litellm_runs_a_tools_loop(is_stream: bool) -> None:
    litellm: Any = pytest.importorskip("litellm")
    with HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS) as http:
        script_turns(http)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for number in (1, 2):
            answer = litellm.completion(
                model=f"openai/{MODEL}",
                api_base=f"{http.base_url}/v1",
                api_key="none",
                messages=messages,
                tools=[TOOL],
                stream=is_stream,
                extra_headers=turn(number),
            )
            if is_stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert messages[-1]["content"] == ANSWER
        assert len(messages) == 5
        with pytest.raises(litellm.BadRequestError):
            litellm.completion(
                model=f"openai/{MODEL}",
                api_base=f"{http.base_url}/v1",
                api_key="none",
                messages=messages,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no"}},
                },
            )


@pytest.mark.parametrize("is_stream", [False, True])
def test_langchain_runs_a_tools_loop(is_stream: bool) -> None:
    langchain_openai: Any = pytest.importorskip("langchain_openai")
    langchain_messages: Any = pytest.importorskip("langchain_core.messages")
    with HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS) as http:
        script_turns(http)
        messages: list[Any] = [langchain_messages.HumanMessage(QUESTION)]
        for number in (1, 2):
            chat = langchain_openai.ChatOpenAI(
                base_url=f"{http.base_url}/v1", api_key="none", model=MODEL, default_headers=turn(number)
            ).bind_tools([TOOL])
            if is_stream:
                parts = list(chat.stream(messages))
                message = parts[0]
                for part in parts[1:]:
                    message = message + part
            else:
                message = chat.invoke(messages)
            messages.append(message)
            for call in message.tool_calls:
                assert call["args"]["days"] == {"Oslo": 1, "Rome": 2}[call["args"]["city"]]
                messages.append(langchain_messages.ToolMessage("4", tool_call_id=call["id"]))
        assert messages[-1].content == ANSWER
        assert len(messages) == 5
