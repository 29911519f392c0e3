"""Streams that hold: disconnects, silence, stuck readers, failures, drains."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest
from starlette.types import Message

from glm53srv.api.asgi import REQUEST_ID
from glm53srv.api.generations import Generations
from glm53srv.api.openai_wire import error_event
from glm53srv.api.output_parser import OutputParser
from glm53srv.api.service import Generation
from glm53srv.api.sse import KEEP_ALIVE, EventStream, StreamTimes
from glm53srv.engine.base import StepPlan
from glm53srv.engine.fake import StepGate
from glm53srv.errors import EngineError, RequestError
from glm53srv.scheduler.stream import TokenStream
from tests.api.harness import make_server, parse_events, serving

LONG = {"max_tokens": 900, "ignore_eos": True}


class PlanLog:
    """Holds the gate and remembers the plans that passed it."""

    def __init__(self) -> None:
        self.gate = StepGate()
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.gate.pass_through(plan)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_disconnect_frees_the_slot_with_the_next_step(is_stream: bool) -> None:
    async def main() -> None:
        log = PlanLog()
        server = make_server(before_step=log)
        async with serving(server) as client:
            log.gate.hold()
            exchange = client.open_chat("a", stream=is_stream, **LONG)
            await asyncio.to_thread(log.gate.wait_until_held)
            exchange.disconnect()
            await exchange.task
            assert server.steps.stats().num_running == 0
            num_plans = len(log.plans)
            log.gate.open()
            other = await client.chat("b", max_tokens=1)
            assert other.status == 200
            assert all(not plan.decode or plan.release for plan in log.plans[num_plans : num_plans + 1])
            server.check_idle()
            assert server.engine.used_slots in ((), (0,), (1,))

    asyncio.run(main())


def test_a_client_that_leaves_the_queue_is_never_computed() -> None:
    """FC-045: A runs, B and C wait; C and then A leave; B starts, C never does."""

    async def main() -> None:
        log = PlanLog()
        server = make_server(before_step=log, max_streams=1)
        async with serving(server) as client:
            server.script("B", "</think>ok")
            log.gate.hold()
            a = client.open_chat("A", stream=True, **LONG)
            await asyncio.to_thread(log.gate.wait_until_held)
            c = client.open_chat("C", stream=True, **LONG)
            await c.wait_for(b"assistant")
            b = client.open_chat("B", stream=True)
            await b.wait_for(b"assistant")
            c.disconnect()
            await c.task
            a.disconnect()
            await a.task
            log.gate.open()
            assert parse_events((await b.answer()).body)[-1] == "[DONE]"
            starts = [p.prefill.start.request_id for p in log.plans if p.prefill and p.prefill.start]
            assert starts == ["A", "B"]
            server.check_idle()

    asyncio.run(main())


def test_a_client_that_leaves_before_its_body_is_read_leaves_nothing() -> None:
    async def main() -> None:
        server = make_server()
        async with serving(server) as client:
            exchange = client.open("POST", "/v1/chat/completions", chunks=[])
            exchange.disconnect()
            await exchange.task
            assert exchange.sent == []
            server.check_idle()

    asyncio.run(main())


def test_a_comment_comes_while_nothing_else_does() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through, keep_alive_s=0.01)
        async with serving(server) as client:
            server.script("a", "r</think>b")
            gate.hold()
            exchange = client.open_chat("a", stream=True)
            await exchange.wait_for(KEEP_ALIVE * 2)  # during prefill, more than once
            gate.open()
            events = parse_events((await exchange.answer()).body)
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert events[-1] == "[DONE]"

    asyncio.run(main())


class Frames:
    """A frame source in a test's hand."""

    def __init__(self, *frames: bytes | Exception) -> None:
        self._frames = list(frames)
        self.is_closed = False
        self.is_waiting = asyncio.Event()

    async def next_frame(self) -> bytes | None:
        if not self._frames:
            return None
        frame = self._frames.pop(0)
        if isinstance(frame, Exception):
            raise frame
        if frame == b"wait":
            self.is_waiting.set()
            await asyncio.Event().wait()
        return frame

    def error_frame(self, error: RequestError) -> bytes:
        return error_event(error)

    def close(self) -> None:
        self.is_closed = True


class Wire:
    """The two ends of a response. block: sending waits from the n-th message on."""

    def __init__(self, block: int | None = None) -> None:
        self.sent: list[Message] = []
        self.block = block
        self.gone = asyncio.Event()
        self.is_blocked = asyncio.Event()

    async def send(self, message: Message) -> None:
        if self.block is not None and len(self.sent) >= self.block:
            self.is_blocked.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def test_a_reader_that_does_not_read_is_given_up() -> None:
    async def main() -> None:
        wire = Wire(block=2)
        frames = Frames(b"one", b"two", b"three")
        stream = EventStream(frames, StreamTimes(keep_alive_s=0.02, write_timeout_s=0.01))
        assert not await stream({REQUEST_ID: "r"}, wire.receive, wire.send)
        assert stream.is_stuck
        assert frames.is_closed

    asyncio.run(main())


def test_a_comment_that_cannot_be_sent_is_given_up_too() -> None:
    async def main() -> None:
        wire = Wire(block=1)
        frames = Frames(b"wait")
        stream = EventStream(frames, StreamTimes(keep_alive_s=0.001, write_timeout_s=0.01))
        assert not await stream({REQUEST_ID: "r"}, wire.receive, wire.send)
        assert stream.is_stuck
        assert frames.is_closed
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_one_send_per_frame_and_an_end() -> None:
    async def main() -> None:
        wire = Wire()
        stream = EventStream(Frames(b"a", b"", b"b"), StreamTimes())
        assert await stream({REQUEST_ID: "r"}, wire.receive, wire.send)
        bodies = [(m["body"], m["more_body"]) for m in wire.sent[1:]]
        assert bodies == [(b"a", True), (b"b", True), (b"", False)]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_stream_that_the_server_cuts_says_so_and_stays_cancelled() -> None:
    async def main() -> None:
        wire = Wire()
        frames = Frames(b"wait")
        stream = EventStream(frames, StreamTimes())
        task = asyncio.create_task(stream({REQUEST_ID: "r"}, wire.receive, wire.send))
        await frames.is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        events = parse_events(b"".join(m["body"] for m in wire.sent[1:]))
        assert events[-2]["error"]["message"] == "the server is shutting down"
        assert events[-1] == "[DONE]"
        assert wire.sent[-1]["more_body"] is False
        assert frames.is_closed

    asyncio.run(main())


def test_a_stream_cut_while_its_last_bytes_go_out_sends_no_second_end() -> None:
    async def main() -> None:
        wire = Wire(block=2)
        stream = EventStream(Frames(b"one"), StreamTimes())
        task = asyncio.create_task(stream({REQUEST_ID: "r"}, wire.receive, wire.send))
        await wire.is_blocked.wait()
        wire.block = None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [m.get("body") for m in wire.sent] == [None, b"one"]

    asyncio.run(main())


def test_an_unexpected_error_ends_the_stream_properly(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        wire = Wire()
        stream = EventStream(Frames(b"data: {}\n\n", ValueError("secret")), StreamTimes())
        await stream({REQUEST_ID: "r1"}, wire.receive, wire.send)
        events = parse_events(b"".join(m["body"] for m in wire.sent[1:]))
        assert events[-2]["error"]["message"] == "Internal error, request id r1"
        assert events[-1] == "[DONE]"
        assert "secret" not in str(events)

    asyncio.run(main())
    assert "stream failed" in caplog.text


def test_an_engine_failure_reaches_every_client_and_the_health() -> None:
    async def main() -> None:
        fail = threading.Event()

        def before_step(plan: StepPlan) -> None:
            if fail.is_set():
                raise EngineError("out of order")

        failures: list[Exception] = []
        server = make_server(before_step=before_step, on_failure=failures.append)
        async with serving(server) as client:
            streamed = client.open_chat("a", stream=True, **LONG)
            whole = client.open_chat("b", **LONG)
            await streamed.wait_for(b"reasoning_content")
            fail.set()
            answer = await whole.answer()
            assert (answer.status, answer.json()["error"]["code"]) == (500, "engine_error")
            events = parse_events((await streamed.answer()).body)
            assert events[-1] == "[DONE]"
            assert events[-2]["error"]["type"] == "server_error"
            assert (await client.chat("c")).status == 500
            health = await client.get("/health")
            assert (health.status, health.json()["status"]) == (500, "failed")
            assert len(failures) == 1

    asyncio.run(main())


def test_a_drain_ends_streams_with_an_error_and_done() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through, drain_timeout_s=0.0)
        async with serving(server) as client:
            exchange = client.open_chat("a", stream=True, **LONG)
            await exchange.wait_for(b"reasoning_content")
            server.lifecycle.begin_drain()
            events = parse_events((await exchange.answer()).body)
            assert events[-1] == "[DONE]"
            assert events[-2]["error"]["type"] == "unavailable_error"
            assert (await client.get("/health")).json() == {"status": "draining"}
            refused = await client.chat("b")
            assert (refused.status, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert (await client.get("/livez")).status == 200

    asyncio.run(main())


def test_running_streams_may_end_within_the_drain_limit() -> None:
    async def main() -> None:
        gate = StepGate()
        server = make_server(before_step=gate.pass_through)
        async with serving(server) as client:
            server.script("a", "r</think>done")
            gate.hold()
            exchange = client.open_chat("a", stream=True)
            await asyncio.to_thread(gate.wait_until_held)
            server.lifecycle.begin_drain()
            gate.open()
            events = parse_events((await exchange.answer()).body)
            assert events[-1] == "[DONE]"
            assert "error" not in events[-2]

    asyncio.run(main())


def test_two_hundred_requests_with_random_aborts_leave_nothing() -> None:
    """Eight clients at once, aborted at every stage; nothing stays in the loop or in the engine."""
    rng = random.Random(5)

    async def main() -> None:
        server = make_server(max_queue=16)
        async with serving(server) as client:
            num_tasks = len(asyncio.all_tasks())
            numbers = iter(range(200))
            outcomes: list[str] = []

            async def one(number: int) -> str:
                fields: dict[str, Any] = {"stream": rng.random() < 0.7, "max_tokens": rng.randint(1, 40)}
                if rng.random() < 0.2:
                    fields["n"] = 2
                exchange = client.open_chat(f"q{number}", **fields, ignore_eos=True)
                if rng.random() < 0.5:
                    return "ok" if (await exchange.answer()).status == 200 else "refused"
                for _ in range(rng.randint(0, 30)):
                    await asyncio.sleep(0)
                exchange.disconnect()
                await exchange.task
                return "left"

            async def work() -> None:
                outcomes.extend([await one(number) for number in numbers])

            await asyncio.gather(*(work() for _ in range(8)))
            assert len(outcomes) == 200
            assert outcomes.count("ok") > 50
            assert outcomes.count("left") > 50
            server.check_idle()
            assert len(asyncio.all_tasks()) == num_tasks
            gc.collect()
            kinds = (Generation, Generations, EventStream, TokenStream, OutputParser)
            assert [thing for thing in gc.get_objects() if isinstance(thing, kinds)] == []

    asyncio.run(main())
