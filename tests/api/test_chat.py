"""POST /v1/chat/completions over the whole application."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.builders import small_tokenizer
from tests.api.harness import MODEL, ids_of, make_server, serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"


def run_chat(text: str, *, end: str | None = None, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """Ask twice, whole and streamed; gives the answer and the stream's events."""

    async def main() -> tuple[dict[str, Any], list[Any]]:
        server = make_server()
        async with serving(server) as client:
            server.script("r", text, end=end)
            whole = await client.chat(**fields)
            streamed = await client.chat(stream=True, **fields)
            assert (whole.status, streamed.status) == (200, 200), whole.body
            assert streamed.headers["content-type"].startswith("text/event-stream")
            server.check_idle()
            return whole.json(), streamed.events()

    return asyncio.run(main())


def assemble(events: list[Any], choice: int = 0) -> dict[str, Any]:
    """Put a stream's choice together as a client does, checking the wire rules on the way."""
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    parts = [part for c in chunks for part in c["choices"] if part["index"] == choice]
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
    finishes = []
    for part in parts:
        delta = part["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function"
                assert call["id"]
                entry = {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                message["calls"].append(entry)
            else:
                assert call["index"] == len(message["calls"]) - 1
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            message["calls"][-1]["arguments"] += call["function"]["arguments"]
        if part["logprobs"]:
            message["logprobs"] += part["logprobs"]["content"]
        finishes.append(part["finish_reason"])
    assert [f for f in finishes if f is not None] == finishes[-1:]
    message["finish"] = finishes[-1]
    return message


def test_reasoning_and_content_are_split_alike_in_both_modes() -> None:
    whole, events = run_chat("Let me see.</think>Hello héllo 🙂!")
    message = whole["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Hello héllo 🙂!",
        "reasoning_content": "Let me see.",
    }
    streamed = assemble(events)
    assert (streamed["reasoning"], streamed["content"]) == ("Let me see.", "Hello héllo 🙂!")
    assert streamed["finish"] == whole["choices"][0]["finish_reason"] == "stop"
    assert whole["model"] == MODEL
    assert whole["id"].startswith("chatcmpl-")


def test_usage_counts_reasoning_and_the_end_token() -> None:
    whole, events = run_chat("ab</think>cd", stream_options={"include_usage": True})
    usage = whole["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    last = events[-2]
    assert (last["choices"], last["usage"]) == ([], usage)
    assert all(event["usage"] is None for event in events[:-2])


@pytest.mark.parametrize(
    ("options", "usages"),
    [
        (None, []),
        ({}, []),
        ({"include_usage": True}, ["last"]),
        ({"include_usage": True, "continuous_usage_stats": True}, ["all"]),
    ],
)
def test_usage_comes_only_as_asked(options: dict[str, Any] | None, usages: list[str]) -> None:
    whole, events = run_chat("a</think>b", stream_options=options)
    shown = [event for event in events[:-1] if event.get("usage")]
    if not usages:
        assert not any("usage" in event for event in events[:-1])
    elif usages == ["last"]:
        assert shown == [events[-2]]
    else:
        assert len(shown) == len(events) - 1
        assert shown[-1]["usage"] == whole["usage"]


def test_a_tool_call_in_both_modes() -> None:
    whole, events = run_chat("Ask.</think>Checking. " + CALL, end="<|observation|>", tools=TOOLS)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Checking."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    streamed = assemble(events)
    assert streamed["finish"] == "tool_calls"
    assert streamed["calls"][0]["arguments"] == call["function"]["arguments"]
    assert whole["choices"][0]["message"]["content"] == streamed["content"]


def test_call_ids_are_unique_within_an_answer() -> None:
    _, events = run_chat("</think>" + CALL + CALL, tools=TOOLS, n=2, temperature=1)
    ids = [call["id"] for choice in (0, 1) for call in assemble(events, choice)["calls"]]
    assert len(set(ids)) == len(ids)


def test_parallel_tool_calls_false_ends_after_the_first() -> None:
    whole, events = run_chat("</think>" + CALL + CALL, tools=TOOLS, parallel_tool_calls=False)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    assert len(assemble(events)["calls"]) == 1
    assert assemble(events)["finish"] == "tool_calls"


def test_a_call_cut_by_length_is_not_listed() -> None:
    text = "</think>" + CALL
    whole, events = run_chat(text, tools=TOOLS, max_tokens=22)
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("length", None)
    assert "<" not in choice["message"]["content"]
    streamed = assemble(events)
    assert streamed["finish"] == "length"
    assert streamed["calls"][0]["arguments"] == '{"city": "Oslo'


def test_thinking_off_starts_in_content() -> None:
    whole, events = run_chat("Paris.", chat_template_kwargs={"enable_thinking": False})
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Paris."}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert assemble(events)["content"] == "Paris."


def test_an_output_without_think_end_is_all_reasoning() -> None:
    whole, _ = run_chat("The answer is 4.")
    choice = whole["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("stop", "include", "content"),
    [
        ("the", False, "hello "),
        (["zzz", " the"], False, "hello"),
        ("lo t", False, "hel"),
        ("the", True, "hello the"),
        ("absent", False, "hello the end"),
    ],
)
def test_stop_strings(stop: Any, include: bool, content: str) -> None:
    whole, events = run_chat("r</think>hello the end", stop=stop, include_stop_str_in_output=include)
    choice = whole["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
    assert assemble(events)["content"] == content


def test_a_stop_string_that_spells_a_special_token_stops_at_it() -> None:
    async def main() -> None:
        server = make_server()
        assistant = small_tokenizer().control_id("<|assistant|>") or 0
        async with serving(server) as client:
            server.scripts["r"] = [*ids_of("</think>a"), assistant, *ids_of("b")]
            with_stop = (await client.chat(stop="<|assistant|>")).json()
            assert with_stop["choices"][0]["message"]["content"] == "a"
            without = (await client.chat()).json()
            assert without["choices"][0]["message"]["content"] == "ab"

    asyncio.run(main())


def test_min_tokens_holds_stop_strings_back() -> None:
    whole, _ = run_chat("</think>abcab", stop="ab", min_tokens=4)
    assert whole["choices"][0]["message"]["content"] == "abc"


def test_logprobs_come_for_every_token_of_the_text() -> None:
    whole, events = run_chat("h</think>é", logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[104], list(b"</think>"), [0xC3], [0xA9]]
    assert [entry["token"] for entry in content] == ["h", "</think>", "\ufffd", "\ufffd"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    assert whole["choices"][0]["logprobs"]["refusal"] is None
    assert assemble(events)["logprobs"] == content


def test_no_logprobs_unless_asked() -> None:
    whole, events = run_chat("a</think>b")
    assert whole["choices"][0]["logprobs"] is None
    assert all(part["logprobs"] is None for event in events[:-1] for part in event["choices"])


def test_choices_end_on_their_own() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            server.script("r", "</think>red")
            server.script("r-1", "</think>a rather long blue")
            whole = (await client.chat(n=2, max_tokens=12)).json()
            streamed = (
                await client.chat(n=2, max_tokens=12, stream=True, stream_options={"include_usage": True})
            ).events()
            finishes = [choice["finish_reason"] for choice in whole["choices"]]
            assert finishes == ["stop", "length"]
            for at, choice in enumerate(whole["choices"]):
                message = assemble([e for e in streamed if e == "[DONE]" or e["choices"]], at)
                assert message["content"] == choice["message"]["content"]
                assert message["finish"] == choice["finish_reason"]
            assert streamed[-2]["usage"] == whole["usage"]
            assert whole["usage"]["completion_tokens"] == 5 + 12
            server.check_idle()

    asyncio.run(main())


def test_seeded_choices_differ_and_repeat() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            fields = {"n": 2, "seed": 7, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
            one = (await client.chat("unscripted", **fields)).json()
            two = (await client.chat("unscripted", **fields)).json()
            texts = [c["message"]["reasoning_content"] for c in one["choices"]]
            assert texts == [c["message"]["reasoning_content"] for c in two["choices"]]
            assert texts[0] != texts[1]

    asyncio.run(main())


def test_every_end_token_ends_without_text() -> None:
    for end in ("<|endoftext|>", "<|user|>", "<|observation|>"):
        whole, events = run_chat("r</think>x", end=end)
        assert whole["choices"][0]["message"]["content"] == "x"
        assert assemble(events)["finish"] == "stop"


def test_headers_and_the_request_id_of_a_stream() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            server.script("my-id", "a</think>b")
            answer = await client.chat("my-id", stream=True)
            assert answer.headers["x-request-id"] == "my-id"
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            odd = await client.open("GET", "/livez", headers={"x-request-id": "a b"}).answer()
            assert odd.headers["x-request-id"].startswith("req_")

    asyncio.run(main())


def test_long_prompts_are_prepared_in_a_thread_and_give_the_same_answer() -> None:
    async def main() -> None:
        server = make_server(max_context_tokens=8192)
        async with serving(server) as client:
            server.script("r", "a</think>b")
            long = [{"role": "user", "content": "hello the " * 600}]
            answer = await client.chat(messages=long)
            assert answer.json()["choices"][0]["message"]["content"] == "b"
            assert answer.json()["usage"]["prompt_tokens"] > 1000

    asyncio.run(main())


def fault_cases(shared_dir: Path) -> list[dict[str, Any]]:
    text = (shared_dir / "fixtures" / "api" / "fault_cases.json").read_text(encoding="utf-8")
    cases: list[dict[str, Any]] = json.loads(text)
    return cases


def check_message(whole: dict[str, Any], events: list[Any], expected: dict[str, Any], name: str) -> None:
    choice = whole["choices"][0]
    message, streamed = choice["message"], assemble(events)
    assert (message.get("reasoning_content") or None) == expected["reasoning_content"], name
    assert (message["content"] or None) == expected["content"], name
    assert choice["finish_reason"] == streamed["finish"] == expected["finish_reason"], name
    calls = [
        {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
        for c in message.get("tool_calls", [])
    ]
    assert calls == expected["tool_calls"], name
    assert streamed["content"] == (message["content"] or ""), name
    assert streamed["reasoning"] == message.get("reasoning_content", ""), name
    complete = streamed["calls"][: len(calls)]
    assert [json.loads(c["arguments"]) for c in complete] == [c["arguments"] for c in calls], name


def test_fault_cases_with_an_expected_message(shared_dir: Path) -> None:
    """Every public report that comes with an output and the message it must give."""
    cases = [case for case in fault_cases(shared_dir) if "message" in case.get("data", {})]
    assert len(cases) >= 25

    async def main() -> None:
        server = make_server(max_context_tokens=4096)
        async with serving(server) as client:
            for case in cases:
                data = case["data"]
                expected = data["message"]
                text = data.get("text") or "".join(data["deltas"])
                server.script(case["id"], text)
                fields: dict[str, Any] = {}
                if data.get("starts_in") == "content":
                    fields["chat_template_kwargs"] = {"enable_thinking": False}
                if "tools" in data:
                    fields["tools"] = [
                        {"type": "function", "function": {"name": n, "parameters": {"properties": p}}}
                        for n, p in data["tools"].items()
                    ]
                if "stop" in data:
                    fields["stop"] = data["stop"]
                if expected["finish_reason"] == "length":
                    fields["max_tokens"] = len(server.scripts[case["id"]])
                whole = await client.chat(case["id"], **fields)
                streamed = await client.chat(case["id"], stream=True, **fields)
                check_message(whole.json(), streamed.events(), expected, case["id"])
            server.check_idle()

    asyncio.run(main())


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {"thinking": False}])
def test_a_model_that_thinks_although_told_not_to_never_shows_the_marker(kwargs: dict[str, bool]) -> None:
    """FC-024: the parser follows the prompt, which ends in a closed block here, not the flag."""
    whole, events = run_chat("Simple fact.</think>Paris.", chat_template_kwargs=kwargs)
    assert whole["choices"][0]["message"]["content"] == "Simple fact.Paris."
    assert assemble(events)["content"] == "Simple fact.Paris."
    whole, _ = run_chat("<think>Simple fact.</think>Paris.", chat_template_kwargs=kwargs)
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Paris.", "Simple fact.")


def content_of(text: str, **fields: Any) -> str:
    whole, events = run_chat(text, **fields)
    content: str = whole["choices"][0]["message"]["content"] or ""
    assert assemble(events)["content"] == content
    return content


def test_the_second_runs_of_the_fault_cases(shared_dir: Path) -> None:
    """Near misses and broken outputs that the reports describe beside the main case."""
    data = {case["id"]: case.get("data", {}) for case in fault_cases(shared_dir)}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    miss = data["FC-033"]
    near = miss["near_miss"]
    assert content_of("".join(near["deltas"]), stop=miss["stop"], **off) == near["content"]
    second = data["FC-035"]["second"]
    assert content_of("".join(second["deltas"]), stop=data["FC-035"]["stop"]) == second["content"]
    recovered, _ = run_chat(data["FC-010"]["malformed"], tools=TOOLS)
    assert recovered["choices"][0]["message"]["content"] is None
    (call,) = recovered["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    broken, events = run_chat(data["FC-016"]["malformed"], tools=TOOLS)
    assert broken["choices"][0]["finish_reason"] == assemble(events)["finish"] == "stop"


def test_text_goes_out_as_utf_8_and_not_as_escapes() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            note = "<arg_key>city</arg_key><arg_value>明天 🎉 上海</arg_value>"
            server.script("r", f"记下。</think><tool_call>get_weather{note}</tool_call>")
            body = (await client.chat(stream=True, tools=TOOLS)).body
            assert "\\u" not in body.decode()
            assert "🎉" in body.decode()

    asyncio.run(main())


def test_unknown_template_arguments_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            server.script("r", "a</think>b")
            for _ in range(3):
                await client.chat(chat_template_kwargs={"enable_thnking\n": False})

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if "enable_thnking" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]


def test_timings_come_under_llama_cpps_names_whole_and_streamed() -> None:
    whole, events = run_chat("a</think>b", stream_options={"include_usage": True})
    names = {"cache_n", "prompt_n", "prompt_ms", "prompt_per_second"}
    names |= {"predicted_n", "predicted_ms", "predicted_per_second"}
    assert set(whole["timings"]) == names
    assert whole["timings"]["prompt_n"] == whole["usage"]["prompt_tokens"]
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"]
    told = [event["timings"] for event in events[:-1] if "timings" in event]
    assert told[-1] == events[-2]["timings"]
    assert [timings["predicted_n"] for timings in told] == [4, 4]
    assert all(value >= 0 for timings in told for value in timings.values())


def test_progress_of_a_long_prompt_is_told_on_request() -> None:
    messages = [{"role": "user", "content": "z" * 200}]
    _, silent = run_chat("a</think>b", messages=messages)
    assert not any("prompt_progress" in event for event in silent[:-1])
    whole, events = run_chat("a</think>b", messages=messages, return_progress=True)
    assert whole["choices"][0]["message"]["content"] == "b"
    told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    total = whole["usage"]["prompt_tokens"]
    assert {entry["total"] for entry in told} == {total}
    # chunks of 64 tokens; a reader that sleeps through one gets its news with the next
    assert [entry["processed"] for entry in told] == [0, *range(64, total, 64), total]
    assert assemble([event for event in events if event == "[DONE]" or event["choices"]])["content"] == "b"


def test_a_cancelled_choice_ends_with_what_it_had() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            server.script("r", "</think>" + "the " * 200)
            exchange = client.open_chat(stream=True)
            await exchange.wait_for(b"the")
            assert server.steps.cancel("other") == 0
            assert server.steps.cancel("r") == 1
            events = (await exchange.answer()).events()
            assert assemble(events)["finish"] == "abort"
            server.check_idle()

    asyncio.run(main())


def test_special_tokens_stand_in_the_text_on_request() -> None:
    async def main() -> None:
        server = make_server()
        assistant = small_tokenizer().control_id("<|assistant|>") or 0
        async with serving(server) as client:
            server.scripts["r"] = [*ids_of("</think>a"), assistant, *ids_of("b")]
            shown = (await client.chat(skip_special_tokens=False)).json()
            assert shown["choices"][0]["message"]["content"] == "a<|assistant|>b"

    asyncio.run(main())
