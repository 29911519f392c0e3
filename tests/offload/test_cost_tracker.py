"""Tracking: fixed parts and slopes are told apart, stalls do little, what is pinned stays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from glm53srv.offload.cost import CostModel, CostOverrides
from glm53srv.offload.cost_tracker import MEMORY_JOBS, CostTracker, FittedCosts
from tests.offload.builders import COSTS

SIZES = [(1.0, size) for size in (1.0, 2.0, 4.0, 8.0)]


def line(fixed: float = 0.1, slope: float = 0.1) -> FittedCosts:
    return FittedCosts((fixed, slope), (True, True), SIZES)


def feed(costs: FittedCosts, fixed: float, slope: float, num_jobs: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(num_jobs // 40):
        sizes = rng.integers(1, 9, 40).astype(np.float64)
        noise = rng.normal(1.0, 0.03, 40)
        costs.observe(np.stack([np.ones(40), sizes], axis=1), (fixed + slope * sizes) * noise)


def test_fixed_part_and_slope_are_told_apart() -> None:
    costs = line(0.1, 0.1)
    feed(costs, 0.02, 0.2, 4 * MEMORY_JOBS)
    assert costs.values == pytest.approx([0.02, 0.2], abs=0.008)


def test_a_change_back_gets_through() -> None:
    costs = line()
    feed(costs, 0.05, 0.3, 4 * MEMORY_JOBS)
    feed(costs, 0.1, 0.1, 5 * MEMORY_JOBS, seed=1)
    assert costs.values == pytest.approx([0.1, 0.1], abs=0.012)


def test_one_stall_does_no_more_than_a_slow_job() -> None:
    stalled, slow = line(), line()
    for costs, elapsed in ((stalled, 500.0), (slow, 1.0)):
        feed(costs, 0.1, 0.1, MEMORY_JOBS)
        costs.observe(np.array([[1.0, 4.0]]), np.array([elapsed]))
    assert stalled.values == pytest.approx(slow.values)
    assert stalled.values == pytest.approx([0.1, 0.1], abs=0.005)


def test_stalls_now_and_then_leave_the_costs_near_the_truth() -> None:
    costs, rng = line(), np.random.default_rng(0)
    for _ in range(3 * MEMORY_JOBS // 40):
        sizes = rng.integers(1, 9, 40).astype(np.float64)
        elapsed = 0.1 + 0.2 * sizes
        elapsed[rng.random(40) < 0.02] = 80.0
        costs.observe(np.stack([np.ones(40), sizes], axis=1), elapsed)
    assert costs.values[1] == pytest.approx(0.2, rel=0.1)


def test_jobs_of_one_size_move_what_they_measure_and_nothing_far() -> None:
    costs = line(0.1, 0.1)
    for _ in range(300):
        costs.observe(np.array([[1.0, 4.0]] * 10), np.full(10, 0.9))
    assert costs.values @ [1.0, 4.0] == pytest.approx(0.9, rel=0.02)
    assert (costs.values > 0).all()


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, 0.0, -1.0])
def test_measurements_that_are_no_times_are_ignored(nonsense: float) -> None:
    costs = line()
    costs.observe(np.array([[1.0, 4.0]]), np.array([nonsense]))
    assert costs.values.tolist() == [0.1, 0.1]


def test_costs_stay_positive() -> None:
    costs = line(0.1, 0.1)
    for _ in range(300):
        costs.observe(np.array([[1.0, 1.0], [1.0, 8.0]]), np.array([0.8, 0.1]))  # a slope below 0
    assert (costs.values > 0).all()


def test_pinned_costs_never_move() -> None:
    tracker = CostTracker(COSTS, CostOverrides(cpu_fixed_ms=0.2, cpu_expert_ms=0.3, zero_copy_ms=0.6))
    for _ in range(100):
        tracker.observe_cpu(np.array([4.0]), np.array([9.0]))
        tracker.observe_gpu(np.array([0.0]), np.array([2.0]), np.array([9.0]))
    assert tracker.costs == CostModel(0.2, 0.3, 0.6, COSTS.vram_expert_ms)  # so runs repeat


def test_a_lane_follows_its_jobs_beside_a_pinned_fixed_part() -> None:
    tracker = CostTracker(COSTS, CostOverrides(cpu_fixed_ms=0.2))
    sizes = np.tile(np.arange(1.0, 9.0), 10)
    for _ in range(200):
        tracker.observe_cpu(sizes, 0.2 + 0.15 * sizes)
    assert tracker.costs.cpu_fixed_ms == 0.2
    assert tracker.costs.cpu_expert_ms == pytest.approx(0.15, rel=0.03)


def test_a_gpu_tells_launches_hits_and_link_apart() -> None:
    tracker = CostTracker(CostModel(0.1, 0.2, 0.4, 0.03))
    rng = np.random.default_rng(3)
    for _ in range(200):
        hits, link = rng.integers(0, 6, 42).astype(np.float64), rng.integers(0, 5, 42).astype(np.float64)
        tracker.observe_gpu(hits, link, 0.06 + 0.01 * hits + 0.25 * link)
    now = tracker.costs
    assert (now.gpu_fixed_ms, now.vram_expert_ms, now.zero_copy_ms) == pytest.approx(
        (0.06, 0.01, 0.25), abs=0.012
    )


@pytest.mark.parametrize("start", [CostModel(0.1, 0.2, 0.4, 0.03, 0.0), CostModel(0.1, 0.2, 0.15, 0.1, 0.3)])
def test_a_gpu_whose_hits_overlap_the_link_is_followed(start: CostModel) -> None:
    tracker = CostTracker(replace(start, is_overlapped=True))
    rng = np.random.default_rng(3)
    for _ in range(200):
        hits, link = rng.integers(0, 8, 42).astype(np.float64), rng.integers(0, 24, 42) / 8
        lane_ms = 0.12 + np.maximum(0.015 * hits, 0.2 * link)
        tracker.observe_gpu(hits, link, lane_ms * rng.normal(1.0, 0.05, 42))
    now = tracker.costs
    assert now.is_overlapped
    assert (now.gpu_fixed_ms, now.vram_expert_ms, now.zero_copy_ms) == pytest.approx(
        (0.12, 0.015, 0.2), abs=0.008
    )


def test_jobs_without_experts_say_nothing() -> None:
    tracker = CostTracker(COSTS)
    tracker.observe_cpu(np.array([0.0, 0.0]), np.array([7.0, 9.0]))
    assert tracker.costs == COSTS


def test_a_hidden_cost_stays_hidden() -> None:
    tracker = CostTracker(CostModel(0.1, 0.2, 0.4, 0.0))
    for _ in range(50):
        tracker.observe_gpu(np.array([8.0, 1.0]), np.array([1.0, 4.0]), np.array([2.0, 2.0]))
    assert tracker.costs.vram_expert_ms == 0.0
