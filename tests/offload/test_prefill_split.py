"""What the CPU takes of a short prompt's layer: the best share of those with few rows, and nothing twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glm53srv.offload.cost import CostModel
from glm53srv.offload.prefill_split import (
    JOB_MS,
    MOST_PACE,
    ROW_SHARE,
    Pace,
    choose_for_cpu,
    rows_ms,
    split_prefill,
)

COSTS = CostModel(cpu_fixed_ms=0.1, cpu_expert_ms=0.17, zero_copy_ms=0.2, vram_expert_ms=0.004)


def slower_lane_ms(num_rows: np.ndarray, resident: np.ndarray, on_cpu: np.ndarray, costs: CostModel) -> float:
    """Time a choice, plainly."""
    missing = (num_rows > 0) & ~resident
    cpu = sum(costs.cpu_expert_ms * (1 + ROW_SHARE * (rows - 1)) for rows in num_rows[on_cpu])
    link = costs.zero_copy_ms * int((missing & ~on_cpu).sum())
    return max(link, JOB_MS + cpu if on_cpu.any() else 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_that_take_the_fewest_rows_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = rng.integers(0, 9, 40)
    resident = rng.random(40) < 0.3
    costs = CostModel(0.1, float(rng.uniform(0.05, 0.5)), float(rng.uniform(0.1, 0.5)), 0.004)
    chosen = choose_for_cpu(num_rows, resident, costs)
    assert not chosen[resident].any()
    assert not chosen[num_rows == 0].any()
    missing = np.flatnonzero((num_rows > 0) & ~resident)
    order = missing[np.argsort(num_rows[missing], kind="stable")]
    times = []
    for count in range(len(order) + 1):
        on_cpu = np.zeros(40, bool)
        on_cpu[order[:count]] = True
        times.append(slower_lane_ms(num_rows, resident, on_cpu, costs))
    assert slower_lane_ms(num_rows, resident, chosen, costs) == pytest.approx(min(times))


def test_a_slow_cpu_and_a_layer_without_misses_leave_all_to_the_gpu() -> None:
    picks = np.arange(16, dtype=np.int64).reshape(2, 8)
    slow = CostModel(0.1, 500.0, 0.2, 0.004)
    assert split_prefill(picks, np.zeros(20, bool), slow) is None
    assert split_prefill(picks, np.ones(20, bool), COSTS) is None


@pytest.mark.parametrize("seed", range(20))
def test_both_parts_add_up_and_the_gpu_reads_nothing_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, experts = int(rng.integers(1, 120)), 64
    picks = np.stack([rng.permutation(experts)[:8] for _ in range(rows)]).astype(np.int64)
    resident = rng.random(experts) < 0.2
    split = split_prefill(picks, resident, COSTS)
    if split is None:
        return
    weights = rng.uniform(0.1, 1.0, picks.shape)
    value = rng.normal(size=(rows, experts))  # what each expert makes of each row
    on_gpu = np.where(split.on_cpu, 0.0, weights)
    gpu = (on_gpu * np.take_along_axis(value, split.gpu_picks, 1)).sum(1)
    cpu_picks = np.where(split.cpu_picks < 0, 0, split.cpu_picks)
    cpu = (np.where(split.cpu_picks < 0, 0.0, weights) * np.take_along_axis(value, cpu_picks, 1)).sum(1)
    whole = (weights * np.take_along_axis(value, picks, 1)).sum(1)
    np.testing.assert_allclose(gpu + cpu, whole, atol=1e-12)
    taken = set(split.cpu_picks[split.cpu_picks >= 0].tolist())
    assert taken.isdisjoint(split.gpu_picks.reshape(-1).tolist())
    assert set(split.gpu_picks.reshape(-1).tolist()) == set(picks.reshape(-1).tolist()) - taken


def test_a_row_that_the_cpu_takes_whole_gets_a_stand_in_that_is_read_anyway() -> None:
    picks = np.array([[0, 1], [2, 3], [2, 3], [2, 3], [2, 3], [2, 3], [2, 3]], np.int64)
    costs = CostModel(0.0, 0.01, 5.0, 0.0)
    resident = np.array([False, False, True, True])
    split = split_prefill(picks, resident, costs)
    assert split is not None
    assert split.cpu_picks[0].tolist() == [0, 1]
    assert set(split.gpu_picks[0].tolist()) <= {2, 3}


def test_what_the_cpu_should_take_is_told() -> None:
    picks = np.array([[0, 1], [0, 2], [1, 3]])
    resident = np.arange(20) == 0
    split = split_prefill(picks, resident, replace(COSTS, zero_copy_ms=50.0))
    assert split is not None
    chosen = np.unique(picks[split.on_cpu])
    num_rows = np.bincount(picks.reshape(-1))[chosen]
    assert split.expected_ms == pytest.approx(rows_ms(num_rows, COSTS).sum())
    assert split.expected_ms > 0


def test_a_pace_follows_errands_and_changes_what_the_cpu_gets() -> None:
    pace = Pace()
    assert pace.apply(COSTS) == COSTS
    for _ in range(200):
        pace.observe(1.0, 3.0)
    assert pace.value == pytest.approx(3.0, rel=0.01)
    num_rows, resident = np.ones(60, int), np.zeros(60, bool)
    slower = choose_for_cpu(num_rows, resident, pace.apply(COSTS)).sum()
    assert 0 < slower < choose_for_cpu(num_rows, resident, COSTS).sum()


def test_a_stall_moves_a_pace_by_a_bounded_step() -> None:
    pace = Pace()
    pace.observe(1.0, 10_000.0)
    assert 1 < pace.value <= 1 + MOST_PACE / 10


def test_stand_ins_are_experts_in_vram_where_there_are_some() -> None:
    resident = np.isin(np.arange(20), (4, 9))
    picks = np.array([[0, 1, 4], [9, 2, 3], [5, 6, 7], [4, 9, 5]])
    split = split_prefill(picks, resident, replace(COSTS, zero_copy_ms=50.0))
    assert split is not None
    assert split.on_cpu[~resident[picks]].all()  # the link is that slow
    stand_ins = split.gpu_picks[split.on_cpu]
    assert resident[stand_ins].all()
    assert split.gpu_picks[0].tolist() == [4, 4, 4]
    assert split.gpu_picks[1].tolist() == [9, 9, 9]
