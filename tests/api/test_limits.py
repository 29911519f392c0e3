"""Keys, origins and time limits at the edge of the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from glm53srv.config import ServerConfig
from glm53srv.engine.fake import StepGate
from tests.api.harness import Answer, Client, make_server, serving

KEYED = ServerConfig(api_keys=("first-key", "second-key"))
WITH_ORIGIN = ServerConfig(api_keys=("k",), cors_origins=("https://page.example",))


def run_with(config: ServerConfig, act: Callable[[Client], Awaitable[Answer]]) -> Answer:
    async def run() -> Answer:
        server = make_server(server_config=config)
        async with serving(server) as client:
            answer = await act(client)
            server.check_idle()
            return answer

    return asyncio.run(run())


def get(config: ServerConfig, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    return run_with(config, lambda client: client.open("GET", path, headers=headers).answer())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"x-api-key": "second-key"},
        {"authorization": "Basic abc", "x-api-key": "first-key"},
    ],
)
def test_each_key_opens_in_either_header(headers: dict[str, str]) -> None:
    assert get(KEYED, "/v1/models", headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer "},
        {"authorization": "first-key"},
        {"authorization": "Bearer first-key,second-key"},
        {"x-api-key": "\u00e9"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere", "/healthy", "/metrics"])
def test_without_a_key_everything_but_probes_is_closed(headers: dict[str, str], path: str) -> None:
    answer = get(KEYED, path, headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert b"first-key" not in answer.body


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/livez"])
def test_probes_need_no_key(path: str) -> None:
    assert get(KEYED, path).status == 200


def test_keys_never_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        get(KEYED, "/v1/models", {"authorization": "Bearer first-key"})
        get(KEYED, "/v1/models", {"authorization": "Bearer wrong-key"})
    assert "status=401" in caplog.text
    assert "-key" not in caplog.text


def test_a_refused_body_is_not_read() -> None:
    answer = run_with(KEYED, lambda client: client.open("POST", "/v1/chat/completions", b"x" * 100).answer())
    assert answer.status == 401
    assert answer.headers["connection"] == "close"


def test_no_origin_is_allowed_unless_named() -> None:
    answer = get(ServerConfig(), "/v1/models", {"origin": "https://page.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_named_origin_may_call_and_its_preflight_needs_no_key() -> None:
    preflight = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = run_with(
        WITH_ORIGIN, lambda client: client.open("OPTIONS", "/v1/chat/completions", headers=preflight).answer()
    )
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    other = get(WITH_ORIGIN, "/v1/models", {"origin": "https://other.example", "x-api-key": "k"})
    assert "access-control-allow-origin" not in other.headers
    refused = get(WITH_ORIGIN, "/v1/models", {"origin": "https://page.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"  # the page may read why


def test_a_body_that_never_ends_is_a_408() -> None:
    async def act(client: Client) -> Answer:
        exchange = client.open("POST", "/v1/chat/completions", chunks=[b"{", b""])
        exchange.incoming.get_nowait()
        exchange.incoming.get_nowait()
        exchange.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        return await exchange.answer()

    answer = run_with(ServerConfig(body_timeout_s=0.01), act)
    assert answer.status == 408
    assert answer.headers["connection"] == "close"
    assert answer.json()["error"]["code"] == "body_timeout"


async def ask_behind_a_held_step(config: ServerConfig, **fields: object) -> list[Answer]:
    """One request holds the only slot in a step that is held; a second one waits. Both time out or not."""
    gate = StepGate()
    server = make_server(server_config=config, before_step=gate.pass_through, max_streams=1)
    async with serving(server) as client:
        gate.hold()
        first = client.open_chat("first", max_tokens=5, **fields)
        await asyncio.to_thread(gate.wait_until_held)
        second = client.open_chat("second", max_tokens=5, **fields)
        answers = [await second.answer()]
        if config.request_timeout_s is None:
            gate.open()
        answers.append(await first.answer())
        gate.open()
        await server.steps.drain(10)
        server.check_idle()
        return answers


def test_waiting_too_long_for_a_slot_is_a_503_and_running_long_is_not() -> None:
    config = ServerConfig(queue_timeout_s=0.02)
    second, first = asyncio.run(ask_behind_a_held_step(config))
    assert (second.status, second.json()["error"]["code"]) == (503, "queue_timeout")
    assert "retry-after" in second.headers
    assert first.status == 200


def test_running_too_long_is_a_504() -> None:
    config = ServerConfig(request_timeout_s=0.02)
    for answer in asyncio.run(ask_behind_a_held_step(config)):
        assert (answer.status, answer.json()["error"]["code"]) == (504, "request_timeout")


@pytest.mark.parametrize("num_choices", [1, 3])
def test_in_a_stream_a_timeout_is_an_error_event_and_a_proper_end(num_choices: int) -> None:
    config = ServerConfig(request_timeout_s=0.02)
    for answer in asyncio.run(ask_behind_a_held_step(config, stream=True, n=num_choices)):
        assert answer.status == 200
        *_, error, done = answer.events()
        assert error["error"]["code"] == "request_timeout"
        assert done == "[DONE]"


def test_requests_in_time_are_left_alone() -> None:
    config = ServerConfig(queue_timeout_s=30, request_timeout_s=30, body_timeout_s=30)
    answer = run_with(config, lambda client: client.chat(max_tokens=5, n=2))
    assert answer.status == 200
    assert all(choice["finish_reason"] for choice in answer.json()["choices"])
