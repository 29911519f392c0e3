"""The ASGI application.

`create_app` builds it over a lifecycle; `app`, for `hypercorn glm53srv.api.app:app`, reads the configuration
from the environment when the server starts it, not at import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm53srv.api import openai_wire
from glm53srv.api.access import ApiKeyGate
from glm53srv.api.asgi import MethodNotAllowed, PathNotFound
from glm53srv.api.generations import Deadlines
from glm53srv.api.info_routes import ServerInfo, describe_server
from glm53srv.api.lifecycle import Lifecycle, Loaded, Loader
from glm53srv.api.loading import checkpoint_loader, scheduler_settings
from glm53srv.api.route_table import starlette_routes
from glm53srv.api.routes import ApiContext, RequestLog
from glm53srv.api.sse import StreamTimes
from glm53srv.config import Config, ServerConfig, load_config
from glm53srv.errors import Glm53Error, RequestError, RequestFailed
from glm53srv.progress import Progress, ProgressLine

logger = logging.getLogger(__name__)

TEXT_THREADS = 2
HYPERCORN_DRAIN_S = 2.0
"""Drain limit under hypercorn's own command, which cuts streams after --graceful-timeout (3 s by default)."""

FLUSH_S = 1.0
"""How long streams get to send their last event before a failed process exits."""


def create_app(
    lifecycle: Lifecycle,
    server: ServerConfig | None = None,
    *,
    handles_signals: bool = False,
    info: ServerInfo | None = None,
) -> Starlette:
    """Build the application. Its lifespan starts and closes the lifecycle.

    info: what /server_info shows of the configuration.
    handles_signals: SIGTERM and SIGINT begin the drain, the second one ends the process; for servers that
    tell the application of a shutdown only after they cut its streams.
    """
    server = server or ServerConfig(host="127.0.0.1")
    text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
    context = ApiContext(
        state=lifecycle.state,
        text_threads=text_threads,
        max_body_bytes=server.max_body_bytes,
        body_timeout_s=server.body_timeout_s,
        times=StreamTimes(keep_alive_s=server.keep_alive_s, write_timeout_s=server.write_timeout_s),
        deadlines=Deadlines(queue_s=server.queue_timeout_s, total_s=server.request_timeout_s),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        lifecycle.start()
        with contextlib.ExitStack() as signals:
            if handles_signals and threading.current_thread() is threading.main_thread():
                signals.enter_context(_drain_on_signals(lifecycle.begin_drain))
            try:
                yield
            finally:
                await lifecycle.aclose()
                text_threads.shutdown(wait=False, cancel_futures=True)

    return Starlette(
        routes=starlette_routes(context, lifecycle.metrics, info or ServerInfo()),
        lifespan=lifespan,
        middleware=_middleware(server),
        exception_handlers={HTTPException: _http_error, Exception: _unexpected_error},
    )


def _middleware(server: ServerConfig) -> list[Middleware]:
    """Give what wraps every request, outermost first: preflights of browsers carry no key."""
    found = [Middleware(RequestLog)]
    if server.cors_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=server.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if server.api_keys:
        found.append(Middleware(ApiKeyGate, keys=server.api_keys))
    return found


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses, in JSON."""
    assert isinstance(error, HTTPException)
    refused: RequestError
    if error.status_code == 405:
        refused = MethodNotAllowed(f"Method {request.method} not allowed")
    elif error.status_code == 404:
        refused = PathNotFound(f"Unknown path {request.url.path}")
    else:
        refused = RequestError(error.detail)
        refused.status = error.status_code
    return _json_response(refused, dict(error.headers or {}))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return _json_response(RequestFailed("Internal error"), {})


def _json_response(error: RequestError, headers: dict[str, str]) -> Response:
    body = orjson.dumps(openai_wire.error_body(error))
    return Response(body, error.status, headers, media_type="application/json")


@contextlib.contextmanager
def _drain_on_signals(begin_drain: Callable[[], None]) -> Any:
    """Hear SIGTERM and SIGINT besides whatever the server does with them.

    asyncio and uvloop dispatch their own handlers through a wakeup descriptor, which setting a Python handler
    does not touch, so the server still begins its shutdown.
    """
    loop = asyncio.get_running_loop()
    count = 0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(128 + number)
        loop.call_soon_threadsafe(begin_drain)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def app_from_config(config: Config) -> Starlette:
    """Build the application as a server without our own entry point needs it.

    A failure ends the process with the error's exit code, once open streams had time to say so.
    """

    def exit_soon(error: Exception) -> None:
        code = error.exit_code if isinstance(error, Glm53Error) else 1
        asyncio.get_running_loop().call_later(FLUSH_S, os._exit, code)

    drain_s = config.server.drain_timeout_s
    if "drain_timeout_s" not in config.sources:
        drain_s = min(drain_s, HYPERCORN_DRAIN_S)
    # Without our own entry point nobody has set up the log; where somebody has, this changes nothing.
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    lifecycle = Lifecycle(
        _plainly(checkpoint_loader(config)),
        scheduler_settings(config),
        drain_timeout_s=drain_s,
        report=ProgressLine(sys.stderr),
        on_failure=exit_soon,
    )
    return create_app(lifecycle, config.server, handles_signals=True, info=describe_server(config))


def _plainly(load: Loader) -> Loader:
    """Say in the log when the weights are noise."""

    def load_and_say(progress: Progress) -> Loaded:
        loaded = load(progress)
        if loaded.model.is_random:
            logger.warning("the weights of %s are random: it speaks nonsense, by design", loaded.model.name)
        return loaded

    return load_and_say


class _EnvironmentApp:
    """The application that the environment describes, built when the server opens its lifespan."""

    def __init__(self) -> None:
        self._app: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            try:
                self._app = app_from_config(load_config(()))
            except Glm53Error as error:
                logger.error("start failed: %s", error)
                if scope["type"] != "lifespan":
                    raise
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self._app(scope, receive, send)


app = _EnvironmentApp()
