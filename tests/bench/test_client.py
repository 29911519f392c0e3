"""The client: events at any split of their bytes, and what it says when a server does not play along."""

from __future__ import annotations

import socket

import pytest

from bench.client import Client, SseParser
from bench.errors import ServerDown, ServerRefused, StreamBroken
from tests.bench.servers import answers, serving

STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\ndata:[DONE]\n\n'


def events(chunks: list[bytes]) -> list[tuple[float, str]]:
    parser = SseParser()
    return [
        (event.arrived_s, event.data) for at, chunk in enumerate(chunks) for event in parser.feed(chunk, at)
    ]


def test_events_are_the_same_at_every_split() -> None:
    whole = [data for _, data in events([STREAM])]
    assert whole == ['{"a": 1}', "two\nlines", "[DONE]"]
    for cut in range(len(STREAM)):
        assert [data for _, data in events([STREAM[:cut], STREAM[cut:]])] == whole
    assert [data for _, data in events([STREAM[at : at + 1] for at in range(len(STREAM))])] == whole


def test_an_event_has_the_time_of_its_last_byte() -> None:
    assert events([b"data: a\n", b"\n", b"data: b\n\n"]) == [(1, "a"), (2, "b")]


def test_a_stream_gives_its_events_up_to_done() -> None:
    content = b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    with serving(answers({"/s": (200, content)})) as url, Client(url).stream("/s", {}) as stream:
        assert [event.json()["n"] for event in stream] == [1, 2]


def test_a_stream_without_done_is_broken() -> None:
    with (
        serving(answers({"/s": (200, b'data: {"n": 1}\n\n')})) as url,
        Client(url).stream("/s", {}) as stream,
        pytest.raises(StreamBroken, match=r"\[DONE\]"),
    ):
        list(stream)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerDown, match=url):
            Client(url).get("/health")


def test_a_refusal_carries_status_and_reason() -> None:
    body = b'{"error": {"message": "too long"}}'
    with (
        serving(answers({"/p": (400, body)})) as url,
        pytest.raises(ServerRefused, match="400: too long") as found,
    ):
        Client(url).stream("/p", {})
    assert found.value.status == 400


@pytest.mark.parametrize("url", ["ftp://host", "http://", "//"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ServerDown, match="no address"):
        Client(url)


def test_the_address_of_the_api_is_that_of_the_server() -> None:
    assert Client("http://host:1/v1/").url == Client("host:1").url == "http://host:1"
