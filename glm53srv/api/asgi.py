"""Small ASGI pieces: reading a body with a bound, noticing that the client left, sending JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from glm53srv.errors import AuthenticationFailed, BodyTooLarge, BodyTooSlow, RequestError

Headers = Sequence[tuple[bytes, bytes]]

REQUEST_ID = "glm53srv.request_id"
"""Scope key of the request's id."""


DISCARD_FACTOR = 4
"""Bodies up to so many times the limit are read to their end before they are refused."""


class ClientGone(Exception):
    """The client left before its request was read; there is nobody to answer."""


class PathNotFound(RequestError):
    """No such path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, for other methods."""

    status = 405
    code = "method_not_allowed"


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float | None = None
) -> bytearray:
    """Read the whole request body; unread bodies would hide a disconnect.

    timeout_s: in which it must have arrived; None: whenever. Raises BodyTooSlow, BodyTooLarge, ClientGone.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(scope, receive, max_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"The request body did not arrive within {timeout_s:g} s") from error


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytearray:
    """Read within any time.

    A body somewhat too large is read and thrown away before it is refused: most clients look at the answer
    only when they have sent everything, and would see a broken connection instead.
    """
    too_large = BodyTooLarge(f"Request body exceeds {max_bytes} bytes; send less, or raise --max-body-mib")
    most = DISCARD_FACTOR * max_bytes
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > most:
        raise too_large
    body = bytearray()  # grows in place: joining 30 MB at the end would hold the event loop
    size = 0
    while size <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size <= max_bytes:
            body += chunk
        else:
            body.clear()
        if not message.get("more_body", False):
            break
    if size > max_bytes:
        raise too_large
    return body


class DisconnectWatch:
    """Cancels the block inside when the client leaves, and swallows that cancellation.

    One task waits on receive(); nothing polls. To be entered after the body was read.

        async with DisconnectWatch(receive) as watch:
            ...
        if watch.is_gone: ...
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._inside: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self._is_ending = False
        self.is_gone = False

    async def __aenter__(self) -> DisconnectWatch:
        self._inside = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch(), name="disconnect watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        inside, watcher = self._inside, self._watcher
        assert inside is not None, "left without being entered"
        assert watcher is not None, "left without being entered"
        self._inside = None
        watcher.cancel()
        while not watcher.done():
            try:
                await asyncio.wait((watcher,))
            except asyncio.CancelledError:
                # Either our own cancellation, requested just as the block ended, or somebody else's.
                if inside.cancelling() > self._num_cancels:
                    raise
        for _ in range(self._num_cancels):
            inside.uncancel()
        is_ours = self._num_cancels > 0 and inside.cancelling() == 0
        return is_ours and isinstance(error, asyncio.CancelledError)

    def expect_end(self) -> None:
        """The last bytes go out now: servers report the end of the response as a disconnect too."""
        self._is_ending = True

    def cancel(self) -> None:
        """Leave the block now, as if the client had left."""
        self.is_gone = True
        if self._inside is not None and self._num_cancels == 0:
            self._num_cancels += 1
            self._inside.cancel()

    async def _watch(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._is_ending:
                self.cancel()


async def send_json(send: Send, status: int, body: object, headers: Headers = ()) -> None:
    """Send a whole JSON answer."""
    data = orjson.dumps(body)
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(data)),
            *headers,
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": data})


def error_headers(error: RequestError) -> Headers:
    """Give the headers that belong to an error answer."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, BodyTooLarge | BodyTooSlow | AuthenticationFailed):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return headers
