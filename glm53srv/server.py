"""Serving over HTTP in one process: the port opens at once, the model loads behind it, and signals end it
well.

    signal or failure -> /health says so, running streams get drain_timeout_s -> listener closes -> engine
    closes a second signal   -> the process ends at once, exit code 128 + its number
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TextIO

from hypercorn.asyncio import serve as serve_hypercorn
from hypercorn.config import Config as HypercornConfig

from glm53srv.api.app import create_app
from glm53srv.api.lifecycle import Lifecycle
from glm53srv.api.loading import checkpoint_loader, scheduler_settings
from glm53srv.config import Config, describe
from glm53srv.doctor import open_socket
from glm53srv.errors import Glm53Error
from glm53srv.progress import ProgressLine

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""How long responses get to send their last bytes after the drain has ended their streams."""

KEEP_ALIVE_S = 75.0
"""Idle connections stay open this long: longer than the 60 s after which common proxies close theirs."""


async def serve(config: Config, terminal: TextIO) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises ConfigError when the port is taken.

    terminal: where the progress line goes.
    """
    stop = asyncio.Event()
    lifecycle = Lifecycle(
        checkpoint_loader(config),
        scheduler_settings(config),
        drain_timeout_s=config.server.drain_timeout_s,
        report=ProgressLine(terminal),
        on_failure=lambda _: stop.set(),
    )
    app = create_app(lifecycle, config.server)
    listener = open_socket(config.server)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _log_start(config, url)
    _end_on_signals(stop)
    announcer = asyncio.create_task(_announce(lifecycle, url))
    try:
        await serve_hypercorn(
            app,  # type: ignore[arg-type]  # the same protocol, spelled by Starlette with looser types
            _hypercorn_config(listener.detach()),  # hypercorn closes it
            shutdown_trigger=lambda: _drained(stop, lifecycle),
        )
    finally:
        announcer.cancel()
        await asyncio.wait((announcer,))
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
    model = running.model
    if model.is_random:
        logger.warning("the weights of %s are random: it speaks nonsense, by design", model.name)
    logger.info("ready url=%s model=%s context_tokens=%d", url, model.name, model.context_tokens)
    logger.info(
        "try: curl -N %s/v1/chat/completions -H 'content-type: application/json' -d "
        '\'{"stream": true, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}\'',
        url,
    )


def _log_start(config: Config, url: str) -> None:
    for line in describe(config):
        logger.info("option %s", line)
    logger.info("listening url=%s; loading %s", url, config.engine.model_dir)


def _hypercorn_config(descriptor: int) -> HypercornConfig:
    hypercorn = HypercornConfig()
    hypercorn.bind = [f"fd://{descriptor}"]
    hypercorn.graceful_timeout = FLUSH_S
    hypercorn.shutdown_timeout = 60.0
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
