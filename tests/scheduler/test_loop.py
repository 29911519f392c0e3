"""StepLoop and TokenStream over a real engine thread; a gate holds steps in flight, nothing sleeps."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from glm53srv.engine.base import Engine, EngineLimits, StepPlan, StepResult
from glm53srv.engine.fake import FakeEngine, StepGate
from glm53srv.errors import EngineError, NotReady, QueueFull, RequestFailed
from glm53srv.request import FinishReason, SamplingParams, TokenEvent
from glm53srv.scheduler.loop import LoopState, StepLoop
from glm53srv.scheduler.scheduler import SchedulerSettings
from glm53srv.scheduler.stream import TokenStream
from tests.builders import EOS_ID, make_limits, make_request
from tests.scheduler.harness import tokens_alone

ENDLESS = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
ONE_LAYER = make_limits(num_layers=1)  # step 0 prefills, step 1 decodes


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an async test on uvloop, which serves, and on asyncio's loop, which hypercorn may choose.

    A hang fails after 30 s, and a task left behind fails at once.
    """

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left: {left}"

    for new_event_loop in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(bounded())


class Rig:
    """A fake engine with a gate, its plans, and a running loop over it."""

    def __init__(
        self,
        limits: EngineLimits = ONE_LAYER,
        *,
        scripts: Mapping[str, Items[int]] | None = None,
        settings: SchedulerSettings | None = None,
        fail_at_step: int | None = None,
    ) -> None:
        self.gate = StepGate()
        self.plans: list[StepPlan] = []
        self.step_threads: set[int] = set()
        self.limits = limits
        self.engine = FakeEngine(
            limits, scripts=scripts, before_step=self._before_step, fail_at_step=fail_at_step
        )
        self.loop = StepLoop(self.engine, settings)

    def _before_step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.step_threads.add(threading.get_ident())
        self.gate.pass_through(plan)

    async def until_held(self) -> int:
        return await asyncio.to_thread(self.gate.wait_until_held)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    rig.loop.start()
    try:
        yield rig
    finally:
        rig.gate.open()
        await rig.loop.aclose()
        assert rig.engine.is_closed


async def read_all(stream: TokenStream) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while batch := await stream.next_events():
        events += batch
    ends = [index for index, event in enumerate(events) if event.finish is not None]
    assert ends == [len(events) - 1]
    return events


def token_ids(events: Items[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


# -- tokens


def test_stream_carries_the_tokens_and_one_end() -> None:
    async def test() -> None:
        async with running(Rig(scripts={"r": [7, 8]})) as rig:
            stream = rig.loop.submit(make_request(num_prompt=5))
            events = await read_all(stream)
            assert token_ids(events) == [7, 8, EOS_ID]
            assert events[-1].finish is FinishReason.STOP
            assert await stream.next_events() == ()
            assert (stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens) == (5, 3, 0)

    run(test)


def test_streams_together_carry_what_each_carries_alone() -> None:
    async def test() -> None:
        limits = make_limits(num_pages=24)
        requests = [make_request(f"r{index}", num_prompt=3 + 4 * index) for index in range(9)]
        async with running(Rig(limits)) as rig:
            results = await asyncio.gather(*(read_all(rig.loop.submit(request)) for request in requests))
        for request, events in zip(requests, results, strict=True):
            assert token_ids(events) == tokens_alone(request, limits)

    run(test)


def test_next_step_is_dispatched_before_a_reader_wakes() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            rig.gate.hold(from_step=1)
            stream = rig.loop.submit(make_request(sampling=ENDLESS))
            await stream.next_events()
            # Blocks the event loop: unless step 1 is on its way already, it never comes.
            assert rig.gate.wait_until_held() == 1

    run(test)


def test_slow_reader_gets_everything_in_one_batch_and_holds_up_nobody() -> None:
    async def test() -> None:
        async with running(Rig(scripts={"slow": [7] * 20, "quick": [8] * 30})) as rig:
            slow = rig.loop.submit(make_request("slow"))
            quick = rig.loop.submit(make_request("quick"))
            await read_all(quick)
            events = await slow.next_events()
            assert token_ids(events) == [7] * 20 + [EOS_ID]
            assert await slow.next_events() == ()

    run(test)


def test_times_come_from_the_clock() -> None:
    async def test() -> None:
        now_s = 50.0

        def clock() -> float:
            return now_s

        loop = StepLoop(FakeEngine(ONE_LAYER, scripts={"r": [7]}), clock=clock)
        loop.start()
        stream = loop.submit(make_request())
        now_s = 51.0
        await read_all(stream)
        sequence = stream.sequence
        assert (sequence.submitted_s, sequence.first_scheduled_s, sequence.last_token_s) == (50.0, 51.0, 51.0)
        await loop.aclose()

    run(test)


def test_idle_loop_does_not_poll() -> None:
    async def test() -> None:
        num_calls = 0

        def clock() -> float:
            nonlocal num_calls
            num_calls += 1
            return 0.0

        engine = FakeEngine(ONE_LAYER, scripts={"r": [7]})
        loop = StepLoop(engine, clock=clock)
        loop.start()
        await read_all(loop.submit(make_request()))
        while engine.used_slots:
            await asyncio.to_thread(lambda: None)
        before = num_calls
        for _ in range(50):
            await asyncio.to_thread(lambda: None)
        assert num_calls - before <= 2  # the end of the release step, and the plan that finds nothing
        await loop.aclose()

    run(test)


# -- ends by the reader


def test_close_during_a_step_drops_its_token_and_releases_the_slot_in_the_next() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            rig.gate.hold(from_step=3)
            stream = rig.loop.submit(make_request(sampling=ENDLESS))
            other = rig.loop.submit(make_request("other", sampling=ENDLESS))
            held = await rig.until_held()
            stream.close()
            stream.close()
            rig.loop.check_integrity()
            rig.gate.hold(from_step=held + 1)
            assert await rig.until_held() == held + 1
            assert rig.plans[held + 1].release == (0,)
            assert await stream.next_events() == ()
            other.close()

    run(test)


def test_close_wakes_a_waiting_reader() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            rig.gate.hold()
            stream = rig.loop.submit(make_request())
            reader = asyncio.create_task(stream.next_events())
            await rig.until_held()
            assert not reader.done()
            stream.close()
            assert await reader == ()

    run(test)


def test_cancelled_reader_can_read_on() -> None:
    async def test() -> None:
        async with running(Rig(scripts={"r": [7, 8]})) as rig:
            rig.gate.hold()
            stream = rig.loop.submit(make_request())
            reader = asyncio.create_task(stream.next_events())
            await rig.until_held()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            rig.gate.open()
            assert token_ids(await read_all(stream)) == [7, 8, EOS_ID]

    run(test)


def test_finish_drops_unread_tokens_and_ends_with_stop() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            rig.gate.hold(from_step=5)
            stream = rig.loop.submit(make_request(sampling=ENDLESS))
            await rig.until_held()
            stream.finish()
            stream.finish()
            assert await stream.next_events() == (TokenEvent(None, finish=FinishReason.STOP),)
            assert await stream.next_events() == ()
            stream.close()
            assert rig.loop.stats().total_finished == 1

    run(test)


def test_finish_replaces_an_end_that_was_not_read() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            stream = rig.loop.submit(make_request(max_tokens=5, sampling=ENDLESS))
            await rig.loop.drain(30.0)
            stream.finish()
            assert await stream.next_events() == (TokenEvent(None, finish=FinishReason.STOP),)
            assert await stream.next_events() == ()

    run(test)


def test_finish_after_the_end_does_nothing() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            stream = rig.loop.submit(make_request(max_tokens=2))
            await read_all(stream)
            stream.finish()
            assert await stream.next_events() == ()

    run(test)


# -- refusals


def test_submit_before_start_and_after_close_is_not_ready() -> None:
    async def test() -> None:
        rig = Rig()
        with pytest.raises(NotReady):
            rig.loop.submit(make_request())
        rig.loop.start()
        await rig.loop.aclose()
        with pytest.raises(NotReady) as caught:
            rig.loop.submit(make_request())
        assert caught.value.retry_after_s is not None

    run(test)


def test_full_queue_refuses_and_recovers() -> None:
    async def test() -> None:
        limits = make_limits(max_streams=1, num_layers=1)
        async with running(Rig(limits, settings=SchedulerSettings(max_queue=1))) as rig:
            rig.gate.hold()
            streams = [rig.loop.submit(make_request(f"r{index}", max_tokens=2)) for index in range(2)]
            with pytest.raises(QueueFull):
                rig.loop.submit(make_request("too many"))
            rig.gate.open()
            for stream in streams:
                await read_all(stream)
            await read_all(rig.loop.submit(make_request("later", max_tokens=2)))

    run(test)


# -- failure


def test_engine_failure_reaches_every_stream_and_later_requests() -> None:
    async def test() -> None:
        limits = make_limits(max_streams=2, num_layers=1)
        async with running(Rig(limits, fail_at_step=4)) as rig:
            streams = [rig.loop.submit(make_request(f"r{index}", sampling=ENDLESS)) for index in range(4)]
            results = await asyncio.gather(*(read_all(stream) for stream in streams))
            assert [events[-1].finish for events in results] == [FinishReason.ERROR] * 4
            assert all(events[-1].error for events in results)
            assert isinstance(await rig.loop.wait_failed(), EngineError)
            assert rig.loop.failure is await rig.loop.wait_failed()
            assert rig.loop.state is LoopState.FAILED
            with pytest.raises(RequestFailed):
                rig.loop.submit(make_request())
            assert rig.plans[-1].step_id == 4
            rig.loop.check_integrity()
            assert (rig.loop.stats().num_running, rig.loop.stats().num_waiting) == (0, 0)
            await rig.loop.drain(0.0)

    run(test)


class WrongAnswers:
    """An engine whose results name another step."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def offload_report(self) -> None:
        return None

    def warm_up(self) -> None:
        self._engine.warm_up()

    def step(self, plan: StepPlan) -> StepResult:
        return replace(self._engine.step(plan), step_id=plan.step_id + 1)

    def close(self) -> None:
        self._engine.close()


def test_answer_to_another_step_is_an_engine_failure() -> None:
    async def test() -> None:
        engine: Engine = WrongAnswers(FakeEngine(ONE_LAYER))
        loop = StepLoop(engine)
        loop.start()
        events = await read_all(loop.submit(make_request()))
        assert events[-1].finish is FinishReason.ERROR
        assert "answered step 1" in str(await loop.wait_failed())
        await loop.aclose()

    run(test)


# -- drain and close


def test_drain_ends_the_queued_and_lets_the_running_finish() -> None:
    async def test() -> None:
        limits = make_limits(max_streams=1, num_layers=1)
        async with running(Rig(limits, scripts={"running": [7] * 9})) as rig:
            rig.gate.hold(from_step=1)
            active = rig.loop.submit(make_request("running"))
            queued = rig.loop.submit(make_request("queued"))
            await rig.until_held()
            drain = asyncio.create_task(rig.loop.drain(30.0))
            assert await read_all(queued) == [TokenEvent(None, finish=FinishReason.ABORT)]
            with pytest.raises(NotReady, match="draining"):
                rig.loop.submit(make_request("late"))
            assert not drain.done()
            rig.gate.open()
            await drain
            assert token_ids(await read_all(active)) == [7] * 9 + [EOS_ID]

    run(test)


def test_drain_aborts_what_outlives_its_time() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            rig.gate.hold(from_step=1)
            stream = rig.loop.submit(make_request(sampling=ENDLESS))
            await rig.until_held()
            first = asyncio.create_task(rig.loop.drain(30.0))
            await rig.loop.drain(0.0)  # the second signal
            await first
            assert (await read_all(stream))[-1].finish is FinishReason.ABORT

    run(test)


def test_drain_without_streams_returns_at_once() -> None:
    async def test() -> None:
        async with running(Rig()) as rig:
            await rig.loop.drain(30.0)
            assert rig.loop.state is LoopState.DRAINING

    run(test)


def test_close_waits_for_the_step_in_flight_and_ends_streams() -> None:
    async def test() -> None:
        rig = Rig()
        rig.loop.start()
        rig.gate.hold(from_step=1)
        stream = rig.loop.submit(make_request(sampling=ENDLESS))
        await rig.until_held()
        closers = [asyncio.create_task(rig.loop.aclose()) for _ in range(2)]
        assert (await read_all(stream))[-1].finish is FinishReason.ABORT
        was_closed = rig.engine.is_closed
        rig.gate.open()
        await asyncio.gather(*closers)
        await rig.loop.aclose()
        assert (was_closed, rig.engine.is_closed) == (False, True)
        assert len(rig.plans) == 2

    run(test)


def test_cancelled_close_still_closes_the_engine() -> None:
    async def test() -> None:
        rig = Rig()
        rig.loop.start()
        rig.gate.hold()
        rig.loop.submit(make_request())
        await rig.until_held()
        closer = asyncio.create_task(rig.loop.aclose())
        await asyncio.to_thread(lambda: None)
        closer.cancel()
        rig.gate.open()
        await rig.loop.aclose()
        assert rig.engine.is_closed

    run(test)


def test_loop_that_never_started_closes_its_engine() -> None:
    async def test() -> None:
        rig = Rig()
        await rig.loop.aclose()
        assert rig.engine.is_closed

    run(test)


def test_callers_executor_runs_every_step_and_outlives_the_loop() -> None:
    async def test() -> None:
        with ThreadPoolExecutor(1) as executor:
            engine_thread = executor.submit(threading.get_ident).result()
            threads: list[int] = []
            engine = FakeEngine(ONE_LAYER, before_step=lambda plan: threads.append(threading.get_ident()))
            loop = StepLoop(engine, executor=executor)
            loop.start()
            await read_all(loop.submit(make_request(max_tokens=5)))
            await loop.aclose()
            assert set(threads) == {engine_thread}
            assert executor.submit(threading.get_ident).result() == engine_thread

    run(test)


# -- all together


async def _chaotic_client(rig: Rig, rng: random.Random, num_requests: int, client: int) -> None:
    for index in range(num_requests):
        sampling = SamplingParams(seed=rng.getrandbits(32), ignore_eos=rng.random() < 0.5)
        request = make_request(
            f"c{client}-{index}",
            num_prompt=rng.randint(1, 40),
            max_tokens=rng.choice([None, 1, 10]),
            sampling=sampling,
        )
        stream = rig.loop.submit(request)
        try:
            num_batches = rng.choice([0, 0, 1, 2, 5, 1000])
            while num_batches > 0 and await stream.next_events():
                num_batches -= 1
                rig.loop.check_integrity()
            if rng.random() < 0.3:
                stream.finish()
        finally:
            stream.close()
        if rng.random() < 0.3:
            await asyncio.to_thread(lambda: None)


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_chaotic_requests_leave_nothing(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        async with running(Rig(make_limits(num_pages=20))) as rig:
            async with asyncio.TaskGroup() as clients:
                for client in range(8):
                    clients.create_task(_chaotic_client(rig, rng, 25, client))
            await rig.loop.drain(0.0)
            while rig.engine.used_slots:
                await asyncio.to_thread(lambda: None)
            rig.loop.check_integrity()
            stats = rig.loop.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
            assert stats.total_requests == stats.total_finished + stats.total_aborted == 200
            assert rig.loop.failure is None
            assert len(rig.step_threads) == 1

    run(test)
