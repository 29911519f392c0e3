"""What bench-model measures, on the CUDA engine over a model and an offload that need no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch, as make test-triton installs it")

from glm53srv.bench_model.driver import Driver, TimedModel
from glm53srv.bench_model.measures import (
    measure_beside,
    measure_decode,
    measure_prefill,
    outgrow,
    peak_rss_gib,
    recall_of_previous,
)
from glm53srv.bench_model.routes import generate
from glm53srv.offload.device.counts import Counts
from tests.engine.cuda.fakes import NUM_LAYERS, FakeModel, FakeOffload, make_engine


@dataclass
class CountingOffload(FakeOffload):
    """Counts, for each decode step, 3 experts in VRAM, 2 over the link, and every second pick a hit."""

    counts: Counts = field(default_factory=Counts)

    def begin_decode(self, num_rows: int, *, is_captured: bool) -> int:
        self.counts.num_vram += 3
        self.counts.num_link += 2
        self.counts.num_picks += 8 * num_rows
        self.counts.num_hit_picks += 4 * num_rows
        return super().begin_decode(num_rows, is_captured=is_captured)


class Bench:
    """An engine with what drives it."""

    def __init__(self) -> None:
        self.model, self.offload = FakeModel(), CountingOffload()
        timed: Any = TimedModel(self.model)
        self.enqueue_s = timed.enqueue_s
        self.engine = make_engine(timed, self.offload)
        self.driver = Driver(self.engine)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.close()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_decode_counts_the_timed_steps_alone(bench: Bench, width: int) -> None:
    bench.enqueue_s.append(100.0)  # of an earlier measure
    found = measure_decode(bench.driver, bench.engine, width, 5, 7, bench.enqueue_s)
    assert asdict(bench.offload.counts)["num_vram"] == 3 * (5 + 7)
    assert (found["vram_experts"], found["link_experts"], found["cpu_experts"]) == (3.0, 2.0, 0.0)
    assert found["hit_rate"] == 0.5
    assert len(bench.enqueue_s) == 7
    assert 0 < found["enqueue_ms"] < found["step_ms"]
    assert bench.offload.calls.count(f"decode {width}") == 12
    assert bench.model.num_states == 0


def test_a_prompt_is_timed_as_often_as_asked_and_leaves_nothing(bench: Bench) -> None:
    times = measure_prefill(bench.driver, 70, 3)
    assert len(times) == 3
    assert min(times) > 0
    assert bench.offload.calls.count("chunk 16") == 3 * 4
    assert bench.offload.calls.count("chunk 6") == 3
    assert bench.model.num_states == 0


def test_a_prompt_beside_a_stream_lets_it_step_between_layers(bench: Bench) -> None:
    found = measure_beside(bench.driver, 40, 2)
    steps = 3 * NUM_LAYERS // 2  # chunks of 16, 16 and 8
    assert bench.offload.calls.count("decode 1") == 8 + steps
    assert found["layers_a_step"] == 2.0
    assert found["longest_gap_ms"] >= found["median_gap_ms"] > 0
    assert found["prefill_tok_s"] > 0
    assert bench.model.num_states == 0


def test_the_most_memory_is_read() -> None:
    assert 0.01 < peak_rss_gib() < 1000


def test_recall_counts_each_row_against_itself() -> None:
    first = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)  # two layers, two rows of two picks
    second = np.array([[2, 9, 1, 2], [6, 5, 0, 0]], np.int32)
    # layer 0: row (2, 9) after (1, 2): one of two; row (1, 2) after (3, 4): none. Layer 1: two, none.
    assert recall_of_previous([first, second], 2) == pytest.approx((0.5 + 0 + 1.0 + 0) / 4)
    assert math.isnan(recall_of_previous([first], 2))
    assert math.isnan(recall_of_previous([], 1))


def test_published_routes_recall_what_was_published() -> None:
    routes = generate(400, seed=3).astype(np.int32)
    assert recall_of_previous(list(routes), 1) == pytest.approx(0.33, abs=0.02)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_prompt_that_outgrows_the_card_is_refused_and_its_company_goes_on(
    bench: Bench, is_full: bool
) -> None:
    bench.driver.prefill_s(0, 20)

    def fill() -> list[str]:
        bench.model.fails_at = NUM_LAYERS - 1 if is_full else None
        return ["ballast"]

    assert outgrow(bench.driver, 1, [0], 40, fill) == is_full
    assert bench.model.num_states == 1
    bench.driver.step(decode=[0])
    bench.driver.step(release=[0])
    assert bench.model.num_states == 0
