"""Every request gets an answer, in JSON, with the right status."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from glm53srv.engine.fake import StepGate
from glm53srv.errors import CheckpointError
from tests.api.harness import MODEL, Answer, Client, LoadGate, make_server, serving


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("raw", ['{"model":"m", x}', "null", "[]", "123", '{"model":"m","messages":', ""])
def test_a_body_that_is_no_object_is_400_and_the_server_goes_on(raw: str) -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            answer = await client.open("POST", "/v1/chat/completions", raw.encode()).answer()
            assert answer.status == 400
            assert error_of(answer)["type"] == "invalid_request_error"
            server.script("r", "</think>ok")
            assert (await client.chat()).status == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_unknown_paths_methods_and_models(method: str, path: str, status: int, code: str) -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            answer = await client.open(method, path).answer()
            assert (answer.status, error_of(answer)["code"]) == (status, code)
            if status == 405:
                assert answer.headers["allow"]

    asyncio.run(main())


def test_refusals_name_the_field_before_a_stream_starts() -> None:
    async def main() -> None:
        async with serving(make_server()) as client:
            bad = await client.chat(stream=True, temperature="hot")
            assert (bad.status, error_of(bad)["param"]) == (400, "temperature")
            unknown = await client.chat(model="gpt", stream=True)
            assert (unknown.status, error_of(unknown)["code"]) == (404, "model_not_found")
            bias = await client.chat(logit_bias={"9999": 1})
            assert (bias.status, error_of(bias)["param"]) == (400, "logit_bias")
            history = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a" 1}'}}]},
            ]
            broken = await client.chat(messages=history)
            assert broken.status == 400
            assert error_of(broken)["param"] == "messages[1].tool_calls[0].function.arguments"

    asyncio.run(main())


def test_the_context_limit_is_exact_and_worded_as_agents_expect() -> None:
    async def main() -> None:
        server = make_server(max_context_tokens=128)
        async with serving(server) as client:
            overhead = (
                await client.chat("u", messages=[{"role": "user", "content": "a"}], max_tokens=1)
            ).json()
            fixed = overhead["usage"]["prompt_tokens"] - 1

            async def ask(num_tokens: int, max_tokens: int) -> Answer:
                text = "a" * (num_tokens - fixed)
                return await client.chat(
                    "u", messages=[{"role": "user", "content": text}], max_tokens=max_tokens, ignore_eos=True
                )

            fits = await ask(120, 8)
            assert (fits.status, fits.json()["usage"]["completion_tokens"]) == (200, 8)
            clamped = await ask(120, 1_000_000)
            assert (clamped.status, clamped.json()["choices"][0]["finish_reason"]) == (200, "length")
            assert clamped.json()["usage"]["total_tokens"] in (128, 129)
            assert (await ask(127, 1)).status == 200
            full = await ask(128, 1)
            error = error_of(full)
            assert (full.status, error["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is 128 tokens" in error["message"]
            server.check_idle()

    asyncio.run(main())


def test_a_body_beyond_the_limit_is_413_announced_or_not() -> None:
    async def main() -> None:
        path = "/v1/chat/completions"
        async with serving(make_server(max_body_bytes=1000)) as client:
            exchanges = [
                client.open("POST", path, b" " * 1001, {"content-length": "1001"}),
                client.open("POST", path, chunks=[b" " * 600, b" " * 600]),
                client.open("POST", path, chunks=[b" " * 1001, b"{}"]),
                # far too large: refused without waiting for the rest, which never comes here
                client.open("POST", path, headers={"content-length": "4001"}, chunks=[]),
            ]
            for exchange in exchanges:
                answer = await exchange.answer()
                assert answer.status == 413
                assert answer.headers["connection"] == "close"
                assert error_of(answer)["message"].startswith("Request body exceeds 1000 bytes")
            fits = client.open("POST", path, chunks=[b"[" + b" " * 498, b" " * 500 + b"]"])
            assert (await fits.answer()).status == 400

    asyncio.run(main())


def test_a_full_queue_is_429_with_retry_after() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through, max_streams=1, max_queue=1)
        async with serving(server) as client:
            gate.hold()
            running = client.open_chat("a", stream=True)
            await running.wait_for(b"assistant")
            await asyncio.to_thread(gate.wait_until_held)
            queued = client.open_chat("b", stream=True)
            await queued.wait_for(b"assistant")
            refused = await client.chat("c", stream=True)
            assert (refused.status, error_of(refused)["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            gate.open()
            running.disconnect()
            queued.disconnect()
            await asyncio.gather(running.task, queued.task)

    asyncio.run(main())


def test_several_choices_are_queued_all_or_none() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through, max_streams=1, max_queue=2)
        async with serving(server) as client:
            gate.hold()
            running = client.open_chat("a", stream=True)
            await running.wait_for(b"assistant")
            await asyncio.to_thread(gate.wait_until_held)
            refused = await client.chat("b", n=3)
            assert refused.status == 429
            assert server.steps.stats().num_waiting == 0
            gate.open()
            running.disconnect()
            await running.task

    asyncio.run(main())


async def health(client: Client) -> tuple[int, dict[str, Any], dict[str, str]]:
    answer = await client.get("/health")
    return answer.status, answer.json(), answer.headers


def test_health_while_loading_and_when_ready() -> None:
    async def main() -> None:
        gate = LoadGate()
        reported = asyncio.Event()
        loop = asyncio.get_running_loop()

        def load(progress: Any) -> None:
            def report(fraction: float, stage: str) -> None:
                progress(fraction, stage)
                loop.call_soon_threadsafe(reported.set)

            gate(report)

        server = make_server(before_load=load)
        async with serving(server, wait=False) as client:
            await reported.wait()
            status, body, headers = await health(client)
            assert (status, body) == (503, {"status": "loading", "progress": 0.42, "stage": "experts 61/144"})
            assert headers["retry-after"] == "5"
            assert (await client.get("/livez")).status == 200
            assert (await client.get("/health/live")).status == 200
            for answer in (await client.get("/v1/models"), await client.chat(stream=True)):
                assert answer.status == 503
                assert answer.headers["retry-after"] == "5"
                assert error_of(answer)["type"] == "unavailable_error"
            gate.let_go()
            await server.lifecycle.wait_settled()
            assert (await health(client))[:2] == (200, {"status": "ready", "model": MODEL})
            assert (await client.get("/health/ready")).status == 200

    asyncio.run(main())


def test_a_failed_load_is_told_and_named() -> None:
    async def main() -> None:
        failures: list[Exception] = []
        gate = LoadGate()
        gate.error = CheckpointError("model.safetensors: missing tensor x")
        gate.let_go()
        server = make_server(before_load=gate, on_failure=failures.append)
        async with serving(server) as client:
            status, body, _ = await health(client)
            assert (status, body["status"]) == (500, "failed")
            assert "missing tensor x" in body["reason"]
            assert (await client.chat()).status == 500
            assert failures == [gate.error]
            assert await server.lifecycle.wait_failed() is gate.error

    asyncio.run(main())


def test_closing_while_loading_stops_the_load() -> None:
    async def main() -> None:
        gate = LoadGate()
        server = make_server(before_load=gate)
        async with serving(server, wait=False):
            asyncio.get_running_loop().call_later(0, gate.let_go)
        assert server.lifecycle.failure is None
        assert not server.engine.is_warm

    asyncio.run(main())


def test_models_tell_the_context_that_is_served() -> None:
    async def main() -> None:
        async with serving(make_server(max_context_tokens=512)) as client:
            listed = (await client.get("/v1/models")).json()
            assert listed["object"] == "list"
            (model,) = listed["data"]
            assert (model["id"], model["max_model_len"], model["owned_by"]) == (MODEL, 512, "glm53srv")
            assert (await client.get(f"/v1/models/{MODEL}")).json() == model

    asyncio.run(main())


def test_two_tools_shapes_and_history_are_taken() -> None:
    """FC-008: the third turn, after tool results, still starts in reasoning."""

    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            server.script("r", "Lyon is warmer.</think>Lyon.")
            call = {
                "id": "c",
                "type": "function",
                "function": {"name": "w", "arguments": json.dumps({"city": "L"})},
            }
            messages = [
                {"role": "user", "content": "Warmer?"},
                {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "21"},
            ]
            answer = (await client.chat(messages=messages, tools=[{"type": "function", "name": "w"}])).json()
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Lyon is warmer.", "Lyon.")

    asyncio.run(main())
