"""Runs steps on the engine thread and hands tokens to their readers; the only asyncio of the scheduler.

    state       submit            live sequences                              may become
    NEW         NotReady          none                                        RUNNING (start)
    RUNNING     accepted          run                                         DRAINING, FAILED, CLOSED
    DRAINING    NotReady          run; those never scheduled ended at once    FAILED, CLOSED
    FAILED      RequestFailed     all ended with FinishReason.ERROR           CLOSED
    CLOSED      NotReady          all ended with FinishReason.ABORT

The event loop thread owns the scheduler, the streams and this object. The engine thread sees only frozen
plans and results. Between two steps the engine waits for apply, plan_step and one thread switch, nothing
else: the next step is dispatched before any reader wakes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from glm53srv.engine.base import Engine, EngineLimits
from glm53srv.errors import NotReady, RequestFailed
from glm53srv.request import FinishReason, GenerationRequest, TokenEvent
from glm53srv.scheduler.scheduler import Scheduler, SchedulerSettings
from glm53srv.scheduler.sequence import Sequence
from glm53srv.scheduler.stats import SchedulerStats
from glm53srv.scheduler.stream import TokenStream

if TYPE_CHECKING:  # numpy: not before the port is open
    from glm53srv.offload.report import OffloadReport

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 10
"""Retry-After of a server that drains or has closed, if a supervisor restarts it; a guess."""


class LoopState(enum.Enum):
    """See the table at the head of this file."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


class SequenceObserver(Protocol):
    """Is told what happens to sequences, on the event loop thread, before their readers are; never raises."""

    def on_token(self, sequence: Sequence) -> None:
        """A token was sampled; the sequence's times and counts have it already."""

    def on_end(self, sequence: Sequence, finish: FinishReason, now_s: float) -> None:
        """The sequence has ended; called once for each."""


class StepLoop:
    """Drives one engine. Every method is called on the event loop thread that called start().

    executor: one thread, on which the engine was loaded and warmed up; step and close run on it. Without one
    the loop makes its own. An executor that was passed in is shut down by its owner, after aclose().
    clock: seconds, monotonic. draw_seed: fresh 64-bit seeds for requests without one. observer: counts.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SchedulerSettings | None = None,
        *,
        executor: ThreadPoolExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        observer: SequenceObserver | None = None,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._scheduler = Scheduler(engine.limits, settings or SchedulerSettings(), draw_seed)
        self._owns_executor = executor is None
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._clock = clock
        self._state = LoopState.NEW
        self._failure: Exception | None = None
        self._streams: dict[int, TokenStream] = {}  # the open ones, by sequence id
        self._has_work = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._is_idle = asyncio.Event()  # no open stream
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def state(self) -> LoopState:
        return self._state

    @property
    def limits(self) -> EngineLimits:
        """What the engine can hold."""
        return self._engine.limits

    @property
    def failure(self) -> Exception | None:
        """What the engine failed with, or None."""
        return self._failure

    def start(self) -> None:
        """Begin to run steps in a task of the running event loop."""
        assert self._state is LoopState.NEW
        self._state = LoopState.RUNNING
        self._task = asyncio.get_running_loop().create_task(self._run(), name="step loop")

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request; its tokens come through the stream.

        Raises RequestError: what Scheduler.submit raises, NotReady before start and from drain on,
        RequestFailed after the engine has failed.
        """
        if self._state is LoopState.FAILED:
            raise RequestFailed("the engine has failed; the server must be restarted")
        if self._state is not LoopState.RUNNING:
            raise NotReady(f"the server takes no requests ({self._state.value})", retry_after_s=RETRY_AFTER_S)
        sequence = self._scheduler.submit(request, self._clock())
        stream = TokenStream(sequence, self._end_stream)
        self._streams[sequence.sequence_id] = stream
        self._is_idle.clear()
        self._has_work.set()
        return stream

    def cancel(self, request_id: str | None) -> int:
        """End the sequences of a request with FinishReason.CANCELLED; returns how many there were.

        Those are the ones of this id, or of this id, "-" and anything: the further choices and prompts of a
        request. None: all.
        """
        streams = [
            stream
            for stream in self._streams.values()
            if request_id is None or _belongs_to(stream.sequence.request.request_id, request_id)
        ]
        self._end_streams(streams, FinishReason.CANCELLED)
        return len(streams)

    @property
    def offload_report(self) -> OffloadReport | None:
        """The engine's expert cache as of the last step, None without one."""
        return self._engine.offload_report

    def stats(self) -> SchedulerStats:
        """Take a snapshot of the scheduler."""
        return self._scheduler.stats(self._clock())

    def check_integrity(self) -> None:
        """Raise AssertionError if the scheduler or the table of streams is inconsistent."""
        self._scheduler.check_integrity()
        num_live = self._scheduler.num_live
        if num_live != len(self._streams):
            raise AssertionError(f"{num_live} live sequences, {len(self._streams)} open streams")

    async def wait_failed(self) -> Exception:
        """Wait until the engine fails, and return what it failed with."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, abort those never scheduled now, and those that still run after timeout_s.

        May be called again, with a shorter time, while it runs. Returns when no stream is open.
        """
        if self._state is LoopState.RUNNING:
            self._state = LoopState.DRAINING
            logger.info("drain streams=%d timeout_s=%g", len(self._streams), timeout_s)
        queued = [stream for stream in self._streams.values() if stream.sequence.first_scheduled_s is None]
        self._end_streams(queued, FinishReason.ABORT)
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            self._end_streams(list(self._streams.values()), FinishReason.ABORT)

    async def aclose(self) -> None:
        """End all streams, wait for the step in flight, and close the engine on its thread. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="step loop close")
        # Shielded: a caller that is cancelled must not leave the engine half closed for the next one.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._state = LoopState.CLOSED
        self._end_streams(list(self._streams.values()), FinishReason.ABORT)
        self._has_work.set()
        if self._task is not None:
            await self._task
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.close)
        finally:
            if self._owns_executor:
                self._executor.shutdown()  # at once: close was its last piece of work

    async def _run(self) -> None:
        """Plan, execute, apply, until the loop is closed or a step fails."""
        try:
            while self._state is not LoopState.CLOSED:
                self._has_work.clear()
                if not await self._step():
                    await self._has_work.wait()
        except Exception as error:  # the step loop's own edge: whatever it is, every reader must hear of it
            self._fail(error)

    async def _step(self) -> bool:
        """Run one step; returns False when there was nothing to do."""
        plan = self._scheduler.plan_step(self._clock())
        if plan is None:
            return False
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._executor, self._engine.step, plan)
        for sequence_id, event in self._scheduler.apply(result, self._clock()):
            stream = self._streams[sequence_id]
            if self._observer is not None and event.token_id is not None:
                self._observer.on_token(stream.sequence)
            stream.push(event)
            if event.finish is not None:
                self._forget(sequence_id, event.finish)
        return True

    def _fail(self, error: Exception) -> None:
        logger.error("engine failed error=%r", error, exc_info=error)
        if self._state is not LoopState.CLOSED:
            self._state = LoopState.FAILED
        self._failure = error
        self._has_failed.set()
        # The engine's own words may show paths and shapes; they are in the log, the client gets the fact.
        text = "the engine failed while it ran this request"
        self._end_streams(list(self._streams.values()), FinishReason.ERROR, text)

    def _end_streams(
        self, streams: list[TokenStream], finish: FinishReason, error: str | None = None
    ) -> None:
        """End sequences with an event. Readers come first: the scheduler may be what has failed."""
        for stream in streams:
            stream.push(TokenEvent(None, finish=finish, error=error))
            self._forget(stream.sequence.sequence_id, finish)
        for stream in streams:
            self._scheduler.abort(stream.sequence.sequence_id, self._clock())

    def _end_stream(self, sequence_id: int, finish: FinishReason) -> None:
        """End one sequence on behalf of its reader. The loop is in a step, as always while one is live."""
        if sequence_id not in self._streams:
            return
        if finish is FinishReason.STOP:
            self._scheduler.finish(sequence_id, self._clock())
        else:
            self._scheduler.abort(sequence_id, self._clock())
        self._forget(sequence_id, finish)

    def _forget(self, sequence_id: int, finish: FinishReason) -> None:
        stream = self._streams.pop(sequence_id)
        if self._observer is not None:
            self._observer.on_end(stream.sequence, finish, self._clock())
        if not self._streams:
            self._is_idle.set()


def _belongs_to(request_id: str, asked: str) -> bool:
    return request_id == asked or request_id.startswith(f"{asked}-")
