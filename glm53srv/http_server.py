"""Hypercorn's connections on our own listening socket, and with the connections of clients that left closed.

Hypercorn 0.18 keeps the socket of an idle connection that the client has closed until its keep-alive time is
over: its reader has ended, but the timer that bounds idleness has not, and the connection waits for both.
With the 75 s that proxies need, 14 new connections a second fill a table of 1,024 files. Its serve() has no
seam there, so this file opens the server and gives every connection a class of our own. It uses no more of
hypercorn than its serve() does: TCPServer, WorkerContext, ASGIWrapper.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from starlette.applications import Starlette

BACKLOG = 1024
CUT_S = 2.0
"""How long connections that outlived the graceful time get to say so."""


async def serve_app(
    app: Starlette, config: Config, listener: socket.socket, stop: Callable[[], Awaitable[None]]
) -> None:
    """Serve until stop() returns: then stop listening, let responses end, and close the app's lifespan.

    listener: bound; closed here. config.graceful_timeout: how long responses may take to end.
    """
    context = WorkerContext(None)
    loop = asyncio.get_running_loop()
    wrapped = ASGIWrapper(app)  # type: ignore[arg-type]  # the same protocol, spelled with looser types
    connections: set[asyncio.Task[None]] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection outside any task"
        connections.add(task)
        task.add_done_callback(connections.discard)
        with contextlib.suppress(OSError):  # of the last write: the peer is gone, and nobody else concerned
            await _Connection(wrapped, loop, config, context, {}, reader, writer)

    async with app.router.lifespan_context(app):
        tls = config.create_ssl_context() if config.ssl_enabled else None
        server = await asyncio.start_server(on_connection, sock=listener, ssl=tls, backlog=BACKLOG)
        try:
            await stop()
        finally:
            await context.terminated.set()  # idle connections close at once
            server.close()
            await _end(connections, config.graceful_timeout)


async def _end(connections: set[asyncio.Task[None]], graceful_s: float) -> None:
    """Wait for connections to end by themselves, then make them."""
    if connections:
        await asyncio.wait(connections, timeout=graceful_s)
    if connections:
        for task in connections:
            task.cancel()
        await asyncio.wait(connections, timeout=CUT_S)


class _Connection(TCPServer):
    """A connection that does not wait for its idle timer once the client has closed it.

    A peer that vanished (ETIMEDOUT, EHOSTUNREACH) is one that left, and no error of the application's.
    """

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and event.idle and self.reader.at_eof():
            return  # a response ended after the client had left: nothing to be idle for
        try:
            await super().protocol_send(event)
        except OSError:
            await self.protocol.handle(Closed())
