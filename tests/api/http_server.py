"""The application under hypercorn and uvloop on a loopback port, in a thread of the test process."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config

from tests.api.harness import Server, make_server

T = TypeVar("T")
TIMEOUT_S = 20.0


class HttpServer:
    """A context manager. `server` belongs to the loop of the thread: look at it through call()."""

    def __init__(self, **options: object) -> None:
        self._options = options
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http server")
        self.server: Server
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> HttpServer:
        self._thread.start()
        if not self._ready.wait(TIMEOUT_S):
            raise TimeoutError("the server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError("the server did not stop")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(TIMEOUT_S)

    def connect(self) -> socket.socket:
        """Open a raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = make_server(**self._options)  # type: ignore[arg-type]  # passed on as given
        config = Config()
        config.bind = [f"fd://{self._socket.detach()}"]  # hypercorn closes it
        config.graceful_timeout = 1.0
        config.errorlog = None

        async def stopped() -> None:
            await self.server.lifecycle.wait_settled()
            self._ready.set()
            await self._stop.wait()

        await serve(self.server.app, config, shutdown_trigger=stopped)  # type: ignore[arg-type]  # Starlette is ASGI 3


class LogWatch(logging.Handler):
    """Waits for lines of the request log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._logger = logging.getLogger("glm53srv.api.routes")
        self._changed = threading.Condition()
        self.lines: list[str] = []

    def __enter__(self) -> LogWatch:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, *needles: str, count: int = 1) -> str:
        """Wait until `count` lines hold all needles; gives the last of them."""

        def found() -> list[str]:
            return [line for line in self.lines if all(needle in line for needle in needles)]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= count, TIMEOUT_S):
                raise AssertionError(f"no {count} lines with {needles} in {self.lines}")
            return found()[-1]
