"""Costs: the table is the optimum, tracking is robust, overrides hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from glm53srv.offload.cost import (
    CostModel,
    cpu_count_table,
    default_costs,
    fit_lane_cost,
)
from tests.offload.builders import COSTS


@pytest.mark.parametrize("seed", range(12))
def test_table_is_the_optimum_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = CostModel(*rng.uniform([0.0, 0.02, 0.05, 0.0], [0.5, 0.5, 1.0, 0.1]).tolist())
    table = cpu_count_table(costs, 32, "fast")
    for hits, misses in itertools.product(range(33), range(33)):
        if hits + misses > 32:
            assert table[hits, misses] == 0
            continue
        times = [costs.layer_ms(hits, misses - n, n) for n in range(misses + 1)]
        assert table[hits, misses] == times.index(min(times))  # of equal ones the first: fewest on the CPU


def test_of_equal_counts_the_smallest_wins() -> None:
    even = CostModel(cpu_fixed_ms=0.0, cpu_expert_ms=0.25, zero_copy_ms=0.25, vram_expert_ms=0.0)
    assert cpu_count_table(even, 8, "fast")[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_exact_mode_sends_nothing_to_the_cpu() -> None:
    assert not cpu_count_table(COSTS, 32, "exact").any()


def test_published_costs_leave_one_miss_of_a_few_to_the_link() -> None:
    blind = CostModel(0.11, 0.104, 0.40, 0.0)  # the published rule does not count hits
    assert cpu_count_table(blind, 8, "fast")[0].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 6]


def test_a_fixed_part_of_the_gpu_moves_misses_to_the_cpu() -> None:
    late = replace(COSTS, gpu_fixed_ms=2 * COSTS.zero_copy_ms)
    table, usual = cpu_count_table(late, 32, "fast"), cpu_count_table(COSTS, 32, "fast")
    assert (table >= usual).all()
    assert table[0, 8] > usual[0, 8]


def test_hits_on_the_gpu_move_misses_to_the_cpu() -> None:
    table = cpu_count_table(COSTS, 32, "fast")
    assert table[10, 6] > table[0, 6]


def test_default_cost_scales_with_threads() -> None:
    assert default_costs(22).cpu_expert_ms == pytest.approx(0.104)
    assert default_costs(11).cpu_expert_ms == pytest.approx(0.208)
    with pytest.raises(ValueError):
        default_costs(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1, 0.0])
def test_impossible_costs_are_refused(bad: float) -> None:
    with pytest.raises(ValueError):
        CostModel(0.1, bad, 0.4, 0.03)


def test_calibration_ignores_interrupted_runs() -> None:
    samples = [(n, 0.11 + 0.104 * n) for n in range(1, 17)]
    samples[3] = (4, 9.0)
    samples[11] = (12, 25.0)
    fixed, per_expert = fit_lane_cost(samples)
    assert fixed == pytest.approx(0.11, abs=0.01)
    assert per_expert == pytest.approx(0.104, rel=0.02)


@pytest.mark.parametrize("samples", [[], [(4, 1.0), (4, 1.1)], [(1, 2.0), (8, 1.0)]])
def test_calibration_refuses_runs_that_say_nothing(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError):
        fit_lane_cost(samples)
