"""A scheduler and a fake engine stepped by hand, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from glm53srv.engine.base import EngineLimits, PrefillSlice, StepPlan, StepResult
from glm53srv.engine.fake import FakeCosts, FakeEngine
from glm53srv.request import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs
from glm53srv.scheduler.scheduler import Scheduler, SchedulerSettings
from glm53srv.scheduler.sequence import Sequence
from glm53srv.scheduler.stats import SchedulerStats
from tests.builders import make_limits


@dataclass
class Record:
    """What a reader of one sequence has seen."""

    sequence: Sequence
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events if event.token_id is not None]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return [entry for event in self.events if event.prompt is not None for entry in event.prompt.logprobs]

    @property
    def finish(self) -> FinishReason | None:
        """How it ended; an event after the end, or two ends, is an error."""
        ends = [index for index, event in enumerate(self.events) if event.finish is not None]
        assert ends in ([], [len(self.events) - 1])
        return self.events[-1].finish if ends else None


class Bench:
    """Steps a scheduler over a FakeEngine; keeps plans and events. The clock moves by reported costs."""

    def __init__(
        self,
        limits: EngineLimits | None = None,
        *,
        settings: SchedulerSettings | None = None,
        costs: FakeCosts | None = None,
        scripts: Mapping[str, Items[int]] | None = None,
    ) -> None:
        self.limits = limits or make_limits()
        self.engine = FakeEngine(self.limits, scripts=scripts, costs=costs)
        self.drawn_seeds = 0
        self.scheduler = Scheduler(self.limits, settings or SchedulerSettings(), self._draw_seed)
        self.now_s = 100.0
        self.records: dict[int, Record] = {}
        self.plans: list[StepPlan] = []
        self._result: StepResult | None = None

    def _draw_seed(self) -> int:
        self.drawn_seeds += 1
        return 1000 + self.drawn_seeds

    def submit(self, request: GenerationRequest) -> Record:
        record = Record(self.scheduler.submit(request, self.now_s))
        self.records[record.sequence.sequence_id] = record
        self.scheduler.check_integrity()
        return record

    def abort(self, record: Record) -> bool:
        was_live = self.scheduler.abort(record.sequence.sequence_id, self.now_s)
        self.scheduler.check_integrity()
        return was_live

    def finish(self, record: Record) -> bool:
        was_live = self.scheduler.finish(record.sequence.sequence_id, self.now_s)
        self.scheduler.check_integrity()
        return was_live

    def begin(self) -> StepPlan | None:
        """Plan a step and put it in flight."""
        plan = self.scheduler.plan_step(self.now_s)
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self._result = self.engine.step(plan)
            self.now_s += self._result.stats.prefill_s + self._result.stats.decode_s
        return plan

    @property
    def is_in_flight(self) -> bool:
        return self._result is not None

    def end(self) -> None:
        """Apply the result of the step in flight."""
        assert self._result is not None
        result, self._result = self._result, None
        for sequence_id, event in self.scheduler.apply(result, self.now_s):
            self.records[sequence_id].events.append(event)
        self.scheduler.check_integrity()

    def step(self) -> StepPlan:
        """Run one step that must have something to do."""
        plan = self.begin()
        assert plan is not None
        self.end()
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        return [self.step() for _ in range(count)]

    def run_to_end(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left, and check that nothing is left anywhere."""
        for _ in range(max_steps):
            if self.begin() is None:
                break
            self.end()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        stats = self.stats
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
        assert self.engine.used_slots == ()

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats(self.now_s)

    @property
    def slices(self) -> list[PrefillSlice]:
        return [plan.prefill for plan in self.plans if plan.prefill is not None]


def run_alone(request: GenerationRequest, limits: EngineLimits) -> Record:
    """Generate a request with a seed on an engine of its own: the oracle for every run in company."""
    assert request.sampling.seed is not None
    bench = Bench(limits)
    record = bench.submit(request)
    bench.run_to_end()
    assert record.sequence.num_preemptions == 0
    return record


def tokens_alone(request: GenerationRequest, limits: EngineLimits) -> list[int]:
    """Give the tokens of a run alone."""
    return run_alone(request, limits).token_ids
