"""Server-sent events that hold: one flush per step, a sign of life in silence, an end that says how it ended.

Three things may happen while a stream waits: the next step comes, the client leaves, or time passes. The
first is the emitter's own await, the second one task on receive(), the third one timer. The timer is set
again only when it fires, so a step costs it nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive, Scope, Send

from glm53srv.api.asgi import REQUEST_ID, DisconnectWatch, Headers
from glm53srv.errors import NotReady, RequestError, RequestFailed

logger = logging.getLogger(__name__)

CUT_S = 1.0
"""How long the last event of a stream that is cut may take to be written."""

CUT_RETRY_S = 10

KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """keep_alive_s: longest silence on the wire. write_timeout_s: how long a reader may not read."""

    keep_alive_s: float = 10.0
    write_timeout_s: float = 60.0


class FrameSource(Protocol):
    """What a stream sends. next_frame is called by one task; close may be called at any time."""

    async def next_frame(self) -> bytes | None:
        """Wait for the next bytes to send, one step's events; None at the proper end."""

    def error_frame(self, error: RequestError) -> bytes:
        """Spell an error and the end of the stream."""

    def close(self) -> None:
        """Stop generating. Idempotent, never waits."""


class EventStream:
    """One response. Sends frames until they end or the client leaves, and always closes the source."""

    def __init__(
        self,
        source: FrameSource,
        times: StreamTimes,
        *,
        headers: Headers = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        """clock: seconds on the event loop's scale; None takes the loop's own."""
        self._source = source
        self._times = times
        self._headers = headers
        self._clock = clock
        self._now: Callable[[], float] = float  # set when the response begins
        self._last_sent_s = 0.0
        self._sending_since_s: float | None = None
        self._comment: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_stuck = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Send the response. Returns whether it ended properly (the client got the last event)."""
        loop = asyncio.get_running_loop()
        self._now = self._clock or loop.time
        self._last_sent_s = self._now()
        is_ending = is_complete = False
        try:
            async with DisconnectWatch(receive) as watch:
                self._set_timer(loop, watch, send)
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [*STREAM_HEADERS, *self._headers],
                    }
                )
                last = await self._emit(send, scope)
                watch.expect_end()
                is_ending = True
                await self._write(send, last, more=False)
                is_complete = True
        except asyncio.CancelledError:  # the server's own limit for streams that outlive it
            if not is_ending:
                await self._say_cut(send)
            raise
        finally:
            self._source.close()
            if self._timer is not None:
                self._timer.cancel()
            await self._end_comment()
        return is_complete

    async def _emit(self, send: Send, scope: Scope) -> bytes:
        """Send frames until there are no more; gives what the stream ends with."""
        try:
            while (frame := await self._source.next_frame()) is not None:
                if frame:
                    await self._write(send, frame, more=True)
        except RequestError as error:
            return self._source.error_frame(error)
        except Exception as error:  # the edge of a request: whoever reads must hear of it
            request_id = scope.get(REQUEST_ID, "-")
            logger.exception("stream failed id=%s error=%r", request_id, error)
            failed = RequestFailed(f"Internal error, request id {request_id}")
            return self._source.error_frame(failed)
        return b""

    async def _say_cut(self, send: Send) -> None:
        """End a stream that the server is about to cut; clients take a silent end for a good answer."""
        cut = NotReady("the server is shutting down", retry_after_s=CUT_RETRY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                await self._write(send, self._source.error_frame(cut), more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        if self._comment is not None:
            await self._end_comment(cancel=False)
        self._sending_since_s = self._now()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since_s = None
        self._last_sent_s = self._now()

    async def _end_comment(self, *, cancel: bool = True) -> None:
        """Wait for a comment that is being sent; two writers must not share the connection."""
        if self._comment is None:
            return
        if cancel:
            self._comment.cancel()
        await asyncio.wait((self._comment,))
        if not self._comment.cancelled():
            self._comment.exception()  # a failed write shows as a disconnect
        self._comment = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop, watch: DisconnectWatch, send: Send) -> None:
        """Call again at the deadline; a write that ends meanwhile may bring it nearer, so look in between."""
        delay_s = min(self._deadline_s() - self._now(), self._times.keep_alive_s)
        self._timer = loop.call_later(max(0.0, delay_s), self._tick, loop, watch, send)

    def _deadline_s(self) -> float:
        if self._sending_since_s is not None:
            return self._sending_since_s + self._times.write_timeout_s
        return self._last_sent_s + self._times.keep_alive_s

    def _tick(self, loop: asyncio.AbstractEventLoop, watch: DisconnectWatch, send: Send) -> None:
        if self._now() >= self._deadline_s():
            if self._sending_since_s is not None:
                self.is_stuck = True
                watch.cancel()
                return
            self._sending_since_s = self._now()
            self._comment = loop.create_task(self._send_comment(send), name="keep-alive")
        self._set_timer(loop, watch, send)

    async def _send_comment(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        self._sending_since_s = None
        self._last_sent_s = self._now()
