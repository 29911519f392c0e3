"""A peer that computes nothing, over an engine that checks every plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm53srv.engine.base import StepPlan, StepResult
from glm53srv.errors import EngineError
from tests.bench_model.test_driver import BookEngine


class NotingEngine(BookEngine):
    """Notes what each step was; fails at the step with number fails_at."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self._fails_at = fails_at

    def step(self, plan: StepPlan) -> StepResult:
        if plan.step_id == self._fails_at:
            raise EngineError("the device is gone\nand more of it")
        if plan.prefill is not None:
            self.calls.append("prompt")
            self.prompts.append(plan.prefill.token_ids)
        if plan.decode:
            self.calls.append(f"decode {len(plan.decode)}")
        return super().step(plan)


class FakePeer:
    """Counts three experts per decode step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.engine = NotingEngine(fails_at)
        self.closed = 0
        self.sent: list[list[int]] = []

    @property
    def routes(self) -> FakePeer:
        return self

    def send(self, streams: Sequence[int]) -> None:
        self.sent.append(list(streams))

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        self.engine.calls.append("hold")
        yield
        self.engine.calls.append("let go")

    def counts(self) -> Mapping[str, int]:
        return {"num_vram": 3 * sum(call.startswith("decode") for call in self.engine.calls)}

    def facts(self) -> dict[str, Any]:
        return {"peak_ram_gib": 1.0}

    def close(self) -> None:
        self.closed += 1
