"""From the open port to the last stream: loading in the background, serving, draining, closing.

The engine thread is made here. Loading, warm-up, every step and close run on it, and on no other thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from glm53srv.api.served import ServedModel
from glm53srv.api.state import Phase, Running, ServerState
from glm53srv.engine.base import Engine
from glm53srv.errors import EngineError, Glm53Error
from glm53srv.metrics import Metrics
from glm53srv.progress import Progress
from glm53srv.scheduler.loop import StepLoop
from glm53srv.scheduler.scheduler import SchedulerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading gives: an engine that is warmed up, the model as the API sees it, and a line on both."""

    engine: Engine
    model: ServedModel
    summary: str = ""


Loader = Callable[[Progress], Loaded]
"""Loads everything, on the engine thread. Raises Glm53Error."""


class LoadCancelled(Glm53Error):
    """The server is closing while the model loads."""


class Lifecycle:
    """Owns the engine thread, the step loop and the server's state. Event loop thread only."""

    def __init__(
        self,
        load: Loader,
        settings: SchedulerSettings | None = None,
        *,
        drain_timeout_s: float = 30.0,
        report: Progress | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """report: is shown the progress too (a line in the terminal), on the engine thread.

        on_failure: called once with what loading or the engine failed with, when streams have been told.
        """
        self._load = load
        self._settings = settings
        self._drain_timeout_s = drain_timeout_s
        self._report = report
        self._on_failure = on_failure
        self.metrics = metrics or Metrics()
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._is_closing = False
        self._main: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._steps: StepLoop | None = None
        self._is_settled = asyncio.Event()
        self._has_failed = asyncio.Event()
        self.failure: Exception | None = None
        self.state = ServerState()

    def start(self) -> None:
        """Begin to load. Returns at once."""
        assert self._main is None, "started twice"
        self._main = asyncio.get_running_loop().create_task(self._run(), name="lifecycle")

    async def wait_settled(self) -> None:
        """Wait until loading has ended, well or not (see state); for programs without a port."""
        await self._is_settled.wait()

    async def wait_failed(self) -> Exception:
        """Wait until loading or the engine fails; gives the error, whose exit_code the process should use."""
        await self._has_failed.wait()
        assert self.failure is not None, "failed without an error"
        return self.failure

    def begin_drain(self) -> None:
        """Take no more requests; running ones may end within the time limit, then are told. Idempotent."""
        self.state.set_draining()
        if self._draining is None and self._steps is not None:
            self._draining = asyncio.get_running_loop().create_task(
                self._steps.drain(self._drain_timeout_s), name="drain"
            )

    async def wait_drained(self) -> None:
        """Wait until the drain that begin_drain() began has ended every stream."""
        if self._draining is not None:
            await asyncio.wait((self._draining,))

    async def aclose(self) -> None:
        """End what still runs, close the engine, end its thread; a load stops at its next report."""
        self._is_closing = True
        self.state.set_draining()
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait((self._draining,))
        if self._main is not None:
            if self._steps is not None:
                self._main.cancel()
            await asyncio.wait((self._main,))
        if self._steps is not None:
            await self._steps.aclose()
        self._engine_thread.shutdown(wait=False)  # its last piece of work is done

    async def _run(self) -> None:
        try:
            steps = await self._load_and_start()
        except Exception as error:  # whatever it is, /health must say it
            if not self._is_closing:
                self._fail(error, "loading")
            return
        finally:
            self._is_settled.set()
        if steps is not None:
            self._fail(await steps.wait_failed(), "a step")

    async def _load_and_start(self) -> StepLoop | None:
        """Load, then run steps; None if the server began to close meanwhile."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        loaded = await loop.run_in_executor(self._engine_thread, self._load, self._on_progress)
        if self._is_closing:
            await loop.run_in_executor(self._engine_thread, loaded.engine.close)
            return None
        self._steps = StepLoop(
            loaded.engine, self._settings, executor=self._engine_thread, observer=self.metrics
        )
        self.metrics.begin(loaded.model.name, self._steps.stats)
        self._steps.start()
        self.state.set_ready(Running(loaded.model, self._steps))
        logger.info("loaded in %.1f s: %s", loop.time() - begin_s, loaded.summary)
        logger.info("ready model=%s context_tokens=%d", loaded.model.name, loaded.model.context_tokens)
        if self.state.phase is Phase.DRAINING:
            self.begin_drain()
        return self._steps

    def _on_progress(self, fraction: float, stage: str) -> None:
        """Pass progress on. On the engine thread; raising here is what stops a load."""
        if self._is_closing:
            raise LoadCancelled("loading was stopped because the server is closing")
        self.state.report(fraction, stage)
        if self._report is not None:
            self._report(fraction, stage)

    def _fail(self, error: Exception, what: str) -> None:
        trace = None if isinstance(error, Glm53Error) and not isinstance(error, EngineError) else error
        logger.error("%s failed: %s", what, error, exc_info=trace)
        self.failure = error
        self.state.set_failed(f"{what} failed: {error}")
        self._has_failed.set()
        if self._on_failure is not None:
            self._on_failure(error)
