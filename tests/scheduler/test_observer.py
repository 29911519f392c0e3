"""Ends from outside and what an observer is told: each token once, each end once, however it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm53srv.engine.fake import FakeEngine, StepGate
from glm53srv.request import FinishReason, SamplingParams
from glm53srv.scheduler.loop import StepLoop
from glm53srv.scheduler.sequence import Sequence
from tests.builders import make_limits, make_request
from tests.scheduler.test_loop import ENDLESS, ONE_LAYER, read_all, run, token_ids


@dataclass
class Diary:
    """A SequenceObserver that writes everything down."""

    tokens: dict[str, int] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)

    def on_token(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        self.tokens[name] = self.tokens.get(name, 0) + 1
        assert self.tokens[name] == len(sequence.output_ids)
        assert (sequence.token_gap_s is None) == (self.tokens[name] == 1)

    def on_end(self, sequence: Sequence, finish: FinishReason, now_s: float) -> None:
        name = sequence.request.request_id
        assert name not in self.ends
        assert now_s >= sequence.submitted_s
        self.ends[name] = finish


def test_an_observer_hears_of_every_token_and_of_every_way_to_end() -> None:
    async def test() -> None:
        diary, gate = Diary(), StepGate()
        engine = FakeEngine(make_limits(num_layers=1), scripts={"stop": [7]}, before_step=gate.pass_through)
        loop = StepLoop(engine, observer=diary)
        loop.start()
        stop = await read_all(loop.submit(make_request("stop")))
        length = await read_all(loop.submit(make_request("length", max_tokens=3, sampling=ENDLESS)))
        gate.hold()
        closed = loop.submit(make_request("closed", sampling=ENDLESS))
        finished = loop.submit(make_request("finished", sampling=ENDLESS))
        cancelled = loop.submit(make_request("cancelled", sampling=ENDLESS))
        drained = loop.submit(make_request("drained", sampling=ENDLESS))
        closed.close()
        finished.finish()
        assert loop.cancel("cancelled") == 1
        await loop.drain(0.0)
        gate.open()
        assert (await read_all(cancelled))[-1].finish is FinishReason.CANCELLED
        assert (await read_all(drained))[-1].finish is FinishReason.ABORT
        await loop.aclose()
        assert diary.tokens == {"stop": len(token_ids(stop)), "length": len(token_ids(length))}
        assert diary.ends == {
            "stop": FinishReason.STOP,
            "length": FinishReason.LENGTH,
            "closed": FinishReason.ABORT,
            "finished": FinishReason.STOP,
            "cancelled": FinishReason.CANCELLED,
            "drained": FinishReason.ABORT,
        }

    run(test)


def test_an_observer_hears_of_a_failed_engine() -> None:
    async def test() -> None:
        diary = Diary()
        loop = StepLoop(FakeEngine(ONE_LAYER, fail_at_step=0), observer=diary)
        loop.start()
        await read_all(loop.submit(make_request("r")))
        assert diary.ends == {"r": FinishReason.ERROR}
        await loop.aclose()

    run(test)


def test_cancel_ends_a_request_with_its_choices_and_no_other() -> None:
    async def test() -> None:
        gate = StepGate()
        loop = StepLoop(FakeEngine(ONE_LAYER, before_step=gate.pass_through))
        loop.start()
        gate.hold()
        names = ("a", "a-1", "a-p2-1", "ab", "b")
        sampling = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
        streams = {name: loop.submit(make_request(name, sampling=sampling)) for name in names}
        assert loop.cancel("") == 0
        assert loop.cancel("a") == 3
        assert loop.cancel("a") == 0
        loop.check_integrity()
        for name in ("a", "a-1", "a-p2-1"):
            assert (await read_all(streams[name]))[-1].finish is FinishReason.CANCELLED
        assert loop.cancel(None) == 2
        gate.open()
        await loop.aclose()

    run(test)
