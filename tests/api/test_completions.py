"""POST /v1/completions over the whole application."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.builders import small_tokenizer
from tests.api.harness import MODEL, Answer, Client, Server, end_ids, ids_of, make_server, serving
from tests.api.http_server import HttpServer
from tests.api.test_http import client_of

PROMPT = "the hello"


async def complete(client: Client, request_id: str = "r", **fields: Any) -> Answer:
    body = {"model": MODEL, "prompt": PROMPT, **fields}
    headers = {"x-request-id": request_id}
    return await client.open("POST", "/v1/completions", json.dumps(body).encode(), headers).answer()


def run(server: Server | None = None, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """Ask twice, whole and streamed; both must say the same. Gives the answer and the stream's events."""

    async def main() -> tuple[dict[str, Any], list[Any]]:
        app = server or make_server()
        async with serving(app) as client:
            whole = await complete(client, **fields)
            streamed = await complete(client, stream=True, **fields)
            assert (whole.status, streamed.status) == (200, 200), whole.body
            app.check_idle()
            body, events = whole.json(), streamed.events()
            for choice in body["choices"]:
                assert assemble(events, choice["index"]) == choice
            return body, events

    return asyncio.run(main())


def assemble(events: list[Any], index: int) -> dict[str, Any]:
    """Put a choice's stream together as a client does."""
    assert events[-1] == "[DONE]"
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events[:-1]}) == 1
    parts = [part for event in events[:-1] for part in event["choices"] if part["index"] == index]
    logprobs: dict[str, list[Any]] | None = None
    for part in parts:
        if part["logprobs"] is not None:
            logprobs = logprobs or {name: [] for name in part["logprobs"]}
            for name, values in part["logprobs"].items():
                logprobs[name] += values
    reasons = [part["finish_reason"] for part in parts]
    assert all(reason is None for reason in reasons[:-1])
    text = "".join(part["text"] for part in parts)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reasons[-1]}


def scripted(text: str, end: str | None = None) -> Server:
    server = make_server()
    server.script("r", text, end=end)
    return server


def test_text_is_answered_alike_whole_and_streamed() -> None:
    body, _ = run(scripted("Hello héllo 🙂!"))
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": "Hello héllo 🙂!", "logprobs": None, "finish_reason": "stop"}
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    num_output = len(ids_of("Hello héllo 🙂!")) + 1
    assert body["usage"]["completion_tokens"] == num_output
    assert body["usage"]["prompt_tokens"] == len(ids_of(PROMPT))
    assert body["timings"]["predicted_n"] == num_output


def test_markers_are_text_and_special_tokens_are_not() -> None:
    server = scripted("a</think>b<tool_call>c", end="<|user|>")
    body, _ = run(server)
    assert body["choices"][0]["text"] == "a</think>b<tool_call>c"


def test_the_spelling_of_a_control_token_in_a_raw_prompt_is_the_token() -> None:
    body, _ = run(scripted("x</think>y"), prompt="<|user|>a<|assistant|><think>")
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2  # x and </think>


@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT], ids_of(PROMPT), [ids_of(PROMPT)]], ids=["text", "texts", "ids", "id lists"]
)
def test_every_form_of_a_prompt_gives_the_same_answer(prompt: Any) -> None:
    body, _ = run(prompt=prompt, max_tokens=5, ignore_eos=True)
    expected, _ = run(max_tokens=5, ignore_eos=True)
    assert body["choices"] == expected["choices"]
    assert body["usage"] == expected["usage"]


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt() -> None:
    server = make_server()
    for name, text in (("r", "a0"), ("r-1", "a1"), ("r-p1", "b0"), ("r-p1-1", "b1")):
        server.script(name, text)
    body, events = run(server, prompt=["one", "three"], n=2, stream_options={"include_usage": True})
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b0", "b1"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == len(ids_of("one")) + len(ids_of("three"))
    assert body["usage"]["completion_tokens"] == 12
    assert events[-2]["usage"] == body["usage"]
    assert events[-2]["choices"] == []


def test_without_max_tokens_the_context_is_the_limit() -> None:
    body, _ = run(make_server(max_context_tokens=128), ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 128


def test_stop_strings_and_stop_ids() -> None:
    body, _ = run(scripted("ab the end"), stop=["the", "zz"])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab ", "stop")
    kept, _ = run(scripted("ab the end"), stop="the", include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "ab the"
    by_id, _ = run(scripted("ab the end"), stop_token_ids=ids_of("b"))
    assert by_id["choices"][0]["text"] == "a"


def test_an_evaluation_harness_finds_its_lists() -> None:
    """The request of lm-eval's local-completions: token ids in, one token out, everything echoed."""
    prompt = ids_of("the hello world")
    fields: dict[str, Any] = {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    for server in (make_server(), scripted("", end="<|user|>")):
        body, _ = run(server, prompt=[prompt], **fields)
        choice = body["choices"][0]
        logprobs = choice["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(logprobs[name]) == len(prompt) + 1, name
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        for token, logprob, top in list(
            zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        )[1:]:
            assert logprob <= 0
            assert top[token] <= max(top.values())
            assert math.isfinite(logprob)
        assert choice["text"].startswith("the hello world")
        assert body["usage"]["completion_tokens"] == 1


def test_echo_without_logprobs_begins_with_the_prompt() -> None:
    body, _ = run(scripted("!"), echo=True, prompt="héllo <|user|>the")
    assert body["choices"][0]["text"] == "héllo <|user|>the!"
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_no_tokens_at_all_is_the_prompt_judged(logprobs: int | None) -> None:
    body, _ = run(echo=True, max_tokens=0, logprobs=logprobs)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert body["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        assert len(choice["logprobs"]["tokens"]) == len(ids_of(PROMPT))


ANY_IDS = st.lists(st.integers(0, small_tokenizer().num_ids - 1), min_size=1, max_size=150)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=ANY_IDS,
    output=st.lists(
        st.integers(0, small_tokenizer().num_ids - 1).filter(lambda i: i not in end_ids()), max_size=20
    ),
    echo=st.booleans(),
    logprobs=st.sampled_from([0, 1, 5]),
    ends=st.booleans(),
)
def test_lists_are_exact_for_any_tokens(
    prompt: list[int], output: list[int], echo: bool, logprobs: int, ends: bool
) -> None:
    server = make_server()
    server.scripts["r"] = output
    num_output = len(output) + ends
    if num_output == 0:
        ends, num_output = True, 1
    body, _ = run(
        server, prompt=prompt, echo=echo, logprobs=logprobs, max_tokens=num_output, skip_special_tokens=False
    )
    (choice,) = body["choices"]
    lists = choice["logprobs"]
    ids = [*(prompt if echo else []), *output, *([end_ids()[0]] if ends else [])]
    tokenizer = small_tokenizer()
    assert lists["tokens"] == [tokenizer.token_bytes(i).decode(errors="replace") for i in ids]
    assert {len(values) for values in lists.values()} == {len(ids)}
    assert [value is None for value in lists["token_logprobs"]] == [
        echo and at == 0 for at in range(len(ids))
    ]
    assert all(top is None or 1 <= len(top) <= logprobs + 1 for top in lists["top_logprobs"])
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(choice["text"]) for offset in offsets)
    expected = tokenizer.decode_bytes(output).decode(errors="replace")
    if echo:
        expected = tokenizer.decode_bytes(prompt).decode(errors="replace") + expected
    assert choice["text"] == expected
    for at, (offset, token) in enumerate(zip(offsets, lists["tokens"], strict=True)):
        is_end = ends and at == len(ids) - 1
        if "\ufffd" not in token and not is_end:
            assert choice["text"][offset : offset + len(token)] == token or "\ufffd" in choice["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"echo": "yes"}, "echo"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop[0]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ],
)
def test_wrong_input_names_the_field(fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            for stream in (False, True):
                answer = await complete(client, stream=stream, **fields)
                assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body
            server.check_idle()

    asyncio.run(main())


def test_a_prompt_beyond_the_context_is_refused_in_the_known_words() -> None:
    async def main() -> None:
        async with serving(make_server(max_context_tokens=64)) as client:
            for prompt in ("z" * 64, [2] * 64, "z" * 100_000):
                answer = await complete(client, prompt=prompt)
                error = answer.json()["error"]
                assert (answer.status, error["code"]) == (400, "context_length_exceeded")
                assert "maximum context length is 64 tokens" in error["message"]
            assert (await complete(client, prompt=[2] * 63)).status == 200

    asyncio.run(main())


def test_a_batch_that_does_not_fit_the_queue_leaves_nothing_behind() -> None:
    async def main() -> None:
        server = make_server(max_streams=1, max_queue=2)
        async with serving(server) as client:
            assert (await complete(client, prompt=["a", "b", "c", "d"])).status == 429
            server.check_idle()
            assert (await complete(client, prompt=["a", "b", "c"], max_tokens=2)).status == 200

    asyncio.run(main())


def test_the_openai_client_completes() -> None:
    with HttpServer() as http, client_of(http) as client:
        http.server.script("r", "Hello 🙂")
        whole = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=1, echo=True)
        assert whole.choices[0].text == PROMPT + "Hello 🙂"
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        values: list[Any] = list(logprobs.token_logprobs or ())
        assert values[0] is None
        stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello 🙂"
        batch = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
        assert [choice.index for choice in batch.choices] == [0, 1]
