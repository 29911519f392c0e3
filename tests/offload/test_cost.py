"""Costs: the table is the optimum, tracking is robust, overrides hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from glm53srv.offload.cost import (
    MIN_GAIN_MS,
    CostModel,
    Parts,
    cpu_count_table,
    default_costs,
    fit_lane_cost,
)
from tests.offload.builders import COSTS


def draw_costs(seed: int, is_overlapped: bool) -> CostModel:
    times = np.random.default_rng(seed).uniform([0.0, 0.02, 0.05, 0.0], [0.5, 0.5, 1.0, 0.1]).tolist()
    return replace(CostModel(*times), gpu_fixed_ms=0.05 * (seed % 3), is_overlapped=is_overlapped)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_table_is_the_optimum_of_brute_force(seed: int, is_overlapped: bool) -> None:
    costs = draw_costs(seed, is_overlapped)
    table = cpu_count_table(costs, 32, "fast")
    for hits, misses in itertools.product(range(33), range(33)):
        if hits + misses > 32:
            assert table[hits, misses] == 0
            continue
        times = [costs.layer_ms(hits, misses - n, n) for n in range(misses + 1)]
        assert table[hits, misses] == times.index(min(times))  # of equal ones the first: fewest on the CPU


@pytest.mark.parametrize("parts", [Parts(16, 16), Parts(5, 4), Parts(16, 0)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_table_of_parts_is_the_optimum_of_brute_force(seed: int, parts: Parts, is_overlapped: bool) -> None:
    costs = draw_costs(seed, is_overlapped)
    table, size, num_shared = cpu_count_table(costs, 16, "fast", parts), parts.num_parts, 0
    for hits, misses in itertools.product(range(17), range(17)):
        if hits + misses > 16:
            continue
        times = {}
        for n in range(misses * size + 1):
            on_cpu, lands = n / size, misses - n // size <= parts.num_landing
            if n % size == 0 or (min(n % size, size - n % size) >= size / 8 and lands):
                times[n] = costs.layer_ms(hits, misses - on_cpu, on_cpu)
        whole_ms = min(ms for n, ms in times.items() if n % size == 0)
        chosen = int(table[hits, misses])
        if chosen % size:
            num_shared += 1
            assert times[chosen] == pytest.approx(min(times.values()))
            assert times[chosen] < whole_ms - MIN_GAIN_MS
            assert all(ms > times[chosen] - 1e-9 for n, ms in times.items() if n < chosen)
        else:
            assert times[chosen] == pytest.approx(whole_ms)
            assert min(times.values()) >= whole_ms - MIN_GAIN_MS - 1e-9
    assert (num_shared > 10) == (parts.num_landing > 0)


def test_a_shared_expert_is_computed_whole_by_the_gpu() -> None:
    costs = CostModel(0.0, cpu_expert_ms=0.01, zero_copy_ms=0.2, vram_expert_ms=0.04, gpu_fixed_ms=0.1)
    assert costs.layer_ms(1, 1.5, 0.5) == pytest.approx(0.1 + 1.5 * 0.04 + 1.5 * 0.2)
    assert costs.layer_ms(1, 2, 1) == pytest.approx(0.1 + 0.04 + 2 * 0.2)


def test_of_hits_and_link_that_overlap_the_longer_counts() -> None:
    costs = CostModel(
        0.05, 0.16, zero_copy_ms=0.2, vram_expert_ms=0.015, gpu_fixed_ms=0.12, is_overlapped=True
    )
    assert costs.gpu_ms(6, 0.25) == pytest.approx(0.12 + 0.09)
    assert costs.gpu_ms(6, 1) == pytest.approx(0.12 + 0.2)
    assert costs.layer_ms(6, 0.5, 0.5) == pytest.approx(0.12 + 0.1), "the shared one goes with the link's"
    apart = replace(costs, is_overlapped=False)
    fewer, usual = (
        cpu_count_table(costs, 8, "fast", Parts(16, 8)),
        cpu_count_table(apart, 8, "fast", Parts(16, 8)),
    )
    assert (fewer <= usual).all()
    # The link carries three eighths of the one miss while five hits are computed.
    assert (fewer[5, 1], usual[5, 1]) == (10, 16)


def test_parts_are_no_slivers_and_only_of_what_lands() -> None:
    parts = Parts(16, 2)
    allowed = [share for share in range(16) if parts.allows(share, 2)]
    assert allowed == [0, *range(2, 15)]
    assert [parts.allows(8, num_link) for num_link in (1, 2, 3)] == [True, True, False]
    assert not any(Parts(1, 9).allows(share, 1) for share in range(1, 2))


def test_exact_mode_shares_nothing() -> None:
    assert not cpu_count_table(COSTS, 32, "exact", Parts(16, 16)).any()


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
