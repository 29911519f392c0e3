"""An HTTP client for servers under measurement: JSON calls, and event streams with the time of every event.

Standard library only, one connection per request, no retries: what a user waits for is what is measured.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from bench.errors import ServerDown, ServerRefused, StreamBroken

READ_BYTES = 65536
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. arrived_s: clock when its last byte was read. data: its data lines, joined."""

    arrived_s: float
    data: str

    def json(self) -> Any:
        """Give the value of its JSON. Raises StreamBroken for anything else."""
        try:
            return json.loads(self.data)
        except ValueError as error:
            raise StreamBroken(f"an event of the stream is no JSON: {self.data[:200]!r}") from error


class SseParser:
    """Cuts a byte stream into events at any split; comments and empty events are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes, arrived_s: float) -> list[Event]:
        """Take bytes that came at arrived_s, give the events that they complete."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            text = line.rstrip(b"\r").decode("utf-8", "replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                events.append(Event(arrived_s, "\n".join(self._data)))
                self._data = []
        return events


class EventStream:
    """A response read as events; a context manager that closes the connection, whatever is left in it.

    begun_s: clock before the request was sent. Iterating ends at [DONE] or at the end of the body; a body
    that ends without [DONE] raises StreamBroken.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        begun_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._response = response
        self._clock = clock
        self.begun_s = begun_s

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        parser = SseParser()
        while True:
            try:
                chunk = self._response.read1(READ_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise StreamBroken(f"the stream broke off: {error!r}") from error
            if not chunk:
                raise StreamBroken("the stream ended without [DONE]")
            for event in parser.feed(chunk, self._clock()):
                if event.data == DONE:
                    return
                yield event

    def close(self) -> None:
        """Close the connection; a server takes it as the client's leaving if the stream still runs."""
        self._response.close()
        self._connection.close()


class Client:
    """Sends requests to one server. Usable from several threads: it holds no connection."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Name the server. url: http(s)://host:port, without /v1. timeout_s: longest silence."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerDown(f"{url!r} is no address of a server; write http://127.0.0.1:30000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.clock = clock
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = urlsplit(self.url).path
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Give the JSON answer of a GET. Raises ServerDown, ServerRefused."""
        return self._call("GET", path, None)

    def post(self, path: str, body: object) -> Any:
        """Give the JSON answer of a POST. Raises ServerDown, ServerRefused."""
        return self._call("POST", path, body)

    def get_text(self, path: str) -> str:
        """Give the text that a GET answers with. Raises ServerDown, ServerRefused."""
        return self._read("GET", path, None).decode("utf-8", "replace")

    def stream(self, path: str, body: object) -> EventStream:
        """Open an event stream; returns once the headers are there. Raises ServerDown, ServerRefused."""
        begun_s = self.clock()
        connection, response = self._open("POST", path, body)
        if response.status != 200:
            with_body = self._drain(connection, response)
            raise self._refusal("POST", path, response.status, with_body)
        return EventStream(connection, response, begun_s, self.clock)

    def _call(self, method: str, path: str, body: object) -> Any:
        content = self._read(method, path, body)
        try:
            return json.loads(content)
        except ValueError as error:
            raise ServerRefused(200, f"{method} {path} answered no JSON: {content[:200]!r}") from error

    def _read(self, method: str, path: str, body: object) -> bytes:
        connection, response = self._open(method, path, body)
        content = self._drain(connection, response)
        if response.status != 200:
            raise self._refusal(method, path, response.status, content)
        return content

    def _open(
        self, method: str, path: str, body: object
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request(method, self._prefix + path, content, self._headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerDown(f"{self.url} does not answer {method} {path}: {error!r}") from error

    def _drain(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerDown(f"{self.url} broke off in its answer: {error!r}") from error
        finally:
            connection.close()

    def _refusal(self, method: str, path: str, status: int, content: bytes) -> ServerRefused:
        try:
            message = str(json.loads(content)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = content[:300].decode("utf-8", "replace")
        return ServerRefused(status, f"{method} {path} answered {status}: {message}")
