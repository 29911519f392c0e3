"""SGLang's /generate over the whole application."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.builders import small_tokenizer
from tests.api.harness import Answer, Client, Server, end_ids, ids_of, make_server, serving
from tests.api.http_server import HttpServer

PROMPT = "the hello"


async def generate(client: Client, request_id: str = "r", method: str = "POST", **fields: Any) -> Answer:
    headers = {"x-request-id": request_id}
    return await client.open(method, "/generate", json.dumps(fields).encode(), headers).answer()


def without_times(body: Any) -> Any:
    if isinstance(body, list):
        return [without_times(entry) for entry in body]
    meta = {name: value for name, value in body["meta_info"].items() if name != "e2e_latency"}
    return {**body, "meta_info": meta}


def run(server: Server | None = None, **fields: Any) -> tuple[Any, list[Any]]:
    """Ask twice, whole and streamed; the last event of a stream must be the whole answer."""

    async def main() -> tuple[Any, list[Any]]:
        app = server or make_server()
        async with serving(app) as client:
            whole = await generate(client, **fields)
            streamed = await generate(client, stream=True, **fields)
            assert (whole.status, streamed.status) == (200, 200), whole.body
            app.check_idle()
            body, events = whole.json(), streamed.events()
            assert events[-1] == "[DONE]"
            if isinstance(body, list):
                last = [[e for e in events[:-1] if e["index"] == at][-1] for at in range(len(body))]
                assert without_times(last) == without_times(body)
            else:
                assert without_times(events[-2]) == without_times(body)
            return body, events

    return asyncio.run(main())


def scripted(text: str, end: str | None = None) -> Server:
    server = make_server()
    server.script("r", text, end=end)
    return server


def test_the_answer_has_text_ids_and_meta() -> None:
    body, _ = run(scripted("a</think>bé"), text=PROMPT)
    assert body["text"] == "a</think>bé"
    assert body["output_ids"] == [*ids_of("a</think>bé"), end_ids()[0]]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": end_ids()[0]},
        "prompt_tokens": len(ids_of(PROMPT)),
        "completion_tokens": len(ids_of("a</think>bé")) + 1,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "weight_version": "default",
        "num_retractions": 0,
    }


def test_a_stream_is_cumulative() -> None:
    _, events = run(scripted("one two three"), text=PROMPT)
    texts = [event["text"] for event in events[:-1]]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(texts) > 3
    assert [event["meta_info"]["finish_reason"] for event in events[:-2]] == [None] * (len(texts) - 1)
    assert [len(event["output_ids"]) for event in events[:-1]] == [
        event["meta_info"]["completion_tokens"] for event in events[:-1]
    ]


def test_put_is_post() -> None:
    async def main() -> None:
        server = scripted("x")
        async with serving(server) as client:
            answers = [await generate(client, method=method, text="a") for method in ("POST", "PUT")]
            assert [answer.json()["text"] for answer in answers] == ["x", "x"]

    asyncio.run(main())


def test_lengths_stops_and_trims() -> None:
    cut, _ = run(scripted("one two"), text="a", sampling_params={"max_new_tokens": 2})
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    stopped, _ = run(scripted("ab the end"), text="a", sampling_params={"stop": ["the"]})
    assert stopped["text"] == "ab "
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "the"}
    kept, _ = run(scripted("ab the end"), text="a", sampling_params={"stop": "the", "no_stop_trim": True})
    assert kept["text"] == "ab the"
    nothing, _ = run(scripted("ab"), text="abc", sampling_params={"max_new_tokens": 0})
    assert (nothing["text"], nothing["output_ids"]) == ("", [])


def test_null_stands_for_the_default() -> None:
    params = {"temperature": None, "top_k": None, "stop": None, "n": None, "max_new_tokens": None}
    body, _ = run(scripted("x"), text="a", sampling_params=params, return_logprob=None, rid=None)
    assert body["text"] == "x"


def test_a_batch_is_a_list_with_ids_in_order() -> None:
    server = make_server()
    for name, text in (("job-0", "a0"), ("job-0-1", "a1"), ("job-1", "b0"), ("job-1-1", "b1")):
        server.script(name, text)
    params = {"n": 2, "temperature": 0}
    body, _ = run(server, text=["one", "three"], rid="job", sampling_params=params)
    assert [entry["text"] for entry in body] == ["a0", "a1", "b0", "b1"]
    assert [entry["meta_info"]["id"] for entry in body] == ["job-0", "job-0-1", "job-1", "job-1-1"]
    assert [entry["index"] for entry in body] == [0, 1, 2, 3]


def test_one_prompt_in_a_list_is_answered_in_a_list() -> None:
    body, _ = run(text=["one"], sampling_params={"max_new_tokens": 1, "temperature": 0})
    assert len(body) == 1


def test_each_prompt_of_a_batch_may_have_its_own_options() -> None:
    server = make_server()
    body, _ = run(
        server,
        input_ids=[[5, 6, 7], [8, 9]],
        rid=["x", "y"],
        sampling_params=[
            {"max_new_tokens": 1, "temperature": 0},
            {"max_new_tokens": 3, "sampling_seed": 4, "ignore_eos": True},
        ],
        return_logprob=[True, False],
        logprob_start_len=[1, -1],
        top_logprobs_num=[2, 0],
    )
    assert [entry["meta_info"]["id"] for entry in body] == ["x", "y"]
    assert [entry["meta_info"]["completion_tokens"] for entry in body] == [1, 3]
    assert len(body[0]["meta_info"]["input_token_logprobs"]) == 2
    assert "input_token_logprobs" not in body[1]["meta_info"]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=st.lists(st.integers(0, small_tokenizer().num_ids - 1), min_size=1, max_size=150),
    start=st.integers(-1, 149),
    num_top=st.sampled_from([0, 1, 3]),
    named=st.lists(st.integers(0, 100), max_size=3, unique=True),
    num_output=st.integers(0, 5),
    names_tokens=st.booleans(),
)
def test_log_probability_lists_are_exact(
    prompt: list[int], start: int, num_top: int, named: list[int], num_output: int, names_tokens: bool
) -> None:
    start = min(start, len(prompt) - 1)
    body, _ = run(
        make_server(),
        input_ids=prompt,
        sampling_params={"max_new_tokens": num_output, "sampling_seed": 7, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=num_top,
        token_ids_logprob=named,
        return_text_in_logprobs=names_tokens,
    )
    meta = body["meta_info"]
    expected_ids = {"input": [] if start < 0 else prompt[start:], "output": body["output_ids"]}
    assert len(body["output_ids"]) == num_output
    for side, ids in expected_ids.items():
        entries = meta[f"{side}_token_logprobs"]
        assert [token_id for _, token_id, _ in entries] == ids
        is_first = side == "input" and start == 0
        assert [value is None for value, _, _ in entries] == [is_first and at == 0 for at in range(len(ids))]
        texts = [
            small_tokenizer().token_bytes(i).decode(errors="replace") if names_tokens else None for i in ids
        ]
        assert [text for _, _, text in entries] == texts
        assert (f"{side}_top_logprobs" in meta) == (num_top > 0)
        assert (f"{side}_token_ids_logprobs" in meta) == bool(named)
        for at, top in enumerate(meta.get(f"{side}_top_logprobs", [])):
            assert (top is None) if is_first and at == 0 else len(top) == num_top
        for at, others in enumerate(meta.get(f"{side}_token_ids_logprobs", [])):
            if not (is_first and at == 0):
                assert [token_id for _, token_id, _ in others] == named


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "sampling_params": {"regex": "(a"}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"sampling_seed": 2**70}}, "sampling_params.sampling_seed"),
        ({"text": "a", "sampling_params": {"min_new_tokens": -1}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop[0]"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": ["a"] * 65}, "text"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": ["x"]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [10**7]}, "token_ids_logprob"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "stream": "yes"}, "stream"),
    ],
)
def test_wrong_input_names_the_field(fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            answer = await generate(client, **fields)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body
            server.check_idle()

    asyncio.run(main())


def test_the_calls_of_sglangs_benchmark_over_a_socket() -> None:
    """It flushes the cache, asks for the model and the server, and reads cumulative streams."""
    with HttpServer() as http, httpx.Client(base_url=http.base_url, timeout=20.0) as client:
        assert client.post("/flush_cache").status_code == 200
        assert client.get("/v1/models").json()["data"]
        assert client.get("/get_server_info").json()["internal_states"]
        fields = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"text": PROMPT, "sampling_params": fields, "stream": True, "return_logprob": True}
        texts = []
        with client.stream("POST", "/generate", json={**body, "logprob_start_len": -1}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    texts.append(event["text"])
        assert event["meta_info"]["completion_tokens"] == 12
        assert len(event["meta_info"]["output_token_logprobs"]) == 12
        assert event["meta_info"]["input_token_logprobs"] == []
        assert all(later.startswith(earlier.rstrip("\ufffd")) for earlier, later in pairwise(texts))
        http.call(http.server.check_idle)
