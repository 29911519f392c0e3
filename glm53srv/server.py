"""Serving over HTTP in one process: the port opens at once, the model loads behind it, and signals end it
well.

    signal or failure -> /health says so, running streams get drain_timeout_s -> listener closes -> engine
    closes a second signal   -> the process ends at once, exit code 128 + its number
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from typing import TextIO

from hypercorn.config import Config as HypercornConfig

from glm53srv.api.app import create_app
from glm53srv.api.info_routes import describe_server
from glm53srv.api.lifecycle import Lifecycle, Loader
from glm53srv.api.loading import checkpoint_loader, scheduler_settings
from glm53srv.config import Config, ServerConfig, describe
from glm53srv.errors import Glm53Error
from glm53srv.http_server import serve_app
from glm53srv.listener import open_socket, remove_socket_file
from glm53srv.progress import ProgressLine

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""How long responses get to send their last bytes after the drain has ended their streams."""

KEEP_ALIVE_S = 75.0
"""Idle connections stay open this long: longer than the 60 s after which common proxies close theirs."""


async def serve(config: Config, terminal: TextIO, load: Loader | None = None) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises ConfigError when the port is taken.

    terminal: where the progress line goes. load: in place of what loads the configuration's checkpoint.
    """
    stop = asyncio.Event()
    lifecycle = Lifecycle(
        load or checkpoint_loader(config),
        scheduler_settings(config),
        drain_timeout_s=config.server.drain_timeout_s,
        report=ProgressLine(terminal, tells_time_left=True),
        on_failure=lambda _: stop.set(),
    )
    app = create_app(lifecycle, config.server, info=describe_server(config))
    listener = open_socket(config.server)
    url = _url_of(listener, config.server)
    _log_start(config, url)
    _end_on_signals(stop)
    announcer = asyncio.create_task(_announce(lifecycle, url))
    try:
        await serve_app(app, _hypercorn_config(config.server), listener, lambda: _drained(stop, lifecycle))
    finally:
        announcer.cancel()
        await asyncio.wait((announcer,))
        remove_socket_file(config.server)
    failure = lifecycle.failure
    if failure is None:
        logger.info("stopped")
        return 0
    return failure.exit_code if isinstance(failure, Glm53Error) else 1


async def _drained(stop: asyncio.Event, lifecycle: Lifecycle) -> None:
    """Wait for the stop, then for the drain; the listener stays open, so that /health can say it."""
    await stop.wait()
    lifecycle.begin_drain()
    await lifecycle.wait_drained()


async def _announce(lifecycle: Lifecycle, url: str) -> None:
    """Say that the server is ready, with something to paste."""
    await lifecycle.wait_settled()
    running = lifecycle.state.running
    if running is None:
        return
    # What loading made lives as long as the process: out of the collector's sight, a full collection no
    # longer walks it with the interpreter lock held (17 ms for the small model's 41,000 objects, measured on
    # a 2-core EPYC VM, 29 November 2026), which every open stream and /health would feel.
    gc.collect()
    gc.freeze()
    model = running.model
    if model.caveat is not None:
        logger.warning("%s", model.caveat)
    logger.info("ready url=%s model=%s context_tokens=%d", url, model.name, model.context_tokens)
    if url.startswith("unix:"):
        logger.info("try: curl --unix-socket %s http://localhost/v1/models", url.removeprefix("unix:"))
        return
    logger.info(
        "try: curl -N %s/v1/chat/completions -H 'content-type: application/json' -d "
        '\'{"stream": true, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}\'',
        url,
    )


def _url_of(listener: socket.socket, config: ServerConfig) -> str:
    if config.unix_socket is not None:
        return f"unix:{config.unix_socket}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _log_start(config: Config, url: str) -> None:
    for line in describe(config):
        logger.info("option %s", line)
    logger.info("listening url=%s; loading %s", url, config.engine.model_dir)


def _hypercorn_config(server: ServerConfig) -> HypercornConfig:
    hypercorn = HypercornConfig()
    if server.tls_cert is not None and server.tls_key is not None:
        hypercorn.certfile, hypercorn.keyfile = str(server.tls_cert), str(server.tls_key)
    hypercorn.graceful_timeout = FLUSH_S
    hypercorn.keep_alive_timeout = KEEP_ALIVE_S
    hypercorn.keep_alive_max_requests = 1_000_000
    hypercorn.include_server_header = False
    hypercorn.accesslog = None
    hypercorn.errorlog = logging.getLogger("hypercorn.error")
    return hypercorn


def _end_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT begin the end; the second one is it."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("second signal, ending at once")
            os._exit(128 + number)
        logger.info("%s: draining", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
