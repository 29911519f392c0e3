"""StepCosts and Rate."""

from __future__ import annotations

import math

import pytest

from glm53srv.scheduler.cost import Rate, StepCosts

ALL = range(45)


def within(costs: StepCosts, budget_s: float, layers: range = ALL, *, is_watched: bool = True) -> int:
    return costs.layers_within(budget_s, 100, layers, is_watched=is_watched)


def test_unknown_costs_give_one_layer() -> None:
    costs = StepCosts()
    assert costs.layer_s(100, 0) is None
    assert within(costs, 10.0) == 1
    assert within(costs, 10.0, is_watched=False) == 1


def test_layers_fill_the_budget_and_not_more() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, ALL, 45 * 0.125)  # 0.125 s a layer, exact in binary
    assert within(costs, 0.5) == 4
    assert within(costs, 0.49) == 3
    assert within(costs, 100.0) == 45
    assert within(costs, 100.0, range(40, 45)) == 5
    assert within(costs, 0.01) == 1
    assert within(costs, -1.0) == 1


def test_a_slow_layer_ends_the_slice_before_it() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, range(8), 1.625, (0.125, 0.125, 0.125, 0.5, 0.125, 0.125, 0.125, 0.5))
    assert within(costs, 0.5, range(8)) == 3
    assert within(costs, 0.875, range(8)) == 4
    assert within(costs, 0.5, range(3, 8)) == 1
    assert within(costs, 0.5, range(4, 8)) == 3


def test_a_layer_never_measured_runs_alone_while_streams_wait() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, range(2), 0.25)
    assert within(costs, 10.0, range(1, 45)) == 1
    assert within(costs, 10.0, range(2, 45)) == 1
    assert within(costs, 0.5, range(2, 45), is_watched=False) == 4  # as slow as the slowest known one


def test_a_sum_is_divided_as_the_layers_are_known_to_differ() -> None:
    costs = StepCosts()
    for layer, seconds in enumerate((0.125, 0.125, 0.5)):
        costs.observe_prefill(100, range(layer, layer + 1), seconds)
    costs.observe_prefill(100, range(3), 1.5)  # twice as slow
    assert [costs.layer_s(100, layer) for layer in range(3)] == pytest.approx([0.25, 0.25, 1.0])


def test_slower_counts_at_once_and_faster_slowly() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, range(1), 0.1)
    costs.observe_prefill(100, range(1), 0.2)
    assert costs.layer_s(100, 0) == pytest.approx(0.2)
    costs.observe_prefill(100, range(1), 0.1)
    assert costs.layer_s(100, 0) == pytest.approx(0.17)
    for _ in range(15):
        costs.observe_prefill(100, range(1), 0.1)
    assert costs.layer_s(100, 0) == pytest.approx(0.1, rel=0.01)


def test_engine_that_reports_no_time_runs_all_layers() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, ALL, 0.0)
    assert within(costs, 0.1) == 45
    assert within(costs, -0.1) == 45


def test_chunk_lengths_are_learned_apart() -> None:
    costs = StepCosts()
    costs.observe_prefill(8192, range(1), 0.2)
    costs.observe_prefill(5, range(1), 0.01)
    assert costs.layer_s(8192, 0) == pytest.approx(0.2)
    assert costs.layer_s(5, 0) == pytest.approx(0.01)


@pytest.mark.parametrize("fixed_s", [0.0, 0.007])
@pytest.mark.parametrize("known", [3, 64, 5000])
def test_unseen_length_is_never_underestimated(known: int, fixed_s: float) -> None:
    def true_s(num_tokens: int) -> float:
        return fixed_s + 2e-5 * num_tokens

    costs = StepCosts()
    costs.observe_prefill(known, range(1), true_s(known))
    for num_tokens in (1, 4, 32, 128, 1000, 8192):
        estimate = costs.layer_s(num_tokens, 0)
        assert estimate is not None
        assert estimate >= true_s(num_tokens) * (1 - 1e-9)


def test_change_of_speed_is_followed_and_an_outlier_forgotten() -> None:
    costs = StepCosts()
    costs.observe_decode(2, 0.05)
    costs.observe_decode(2, 5.0)
    for _ in range(15):
        costs.observe_decode(2, 0.05)
    assert costs.decode_s(2) == pytest.approx(0.05, rel=0.5)


def test_decode_cost_is_known_by_rows_and_taken_from_the_nearest() -> None:
    costs = StepCosts()
    assert costs.decode_s(1) == 0.0
    costs.observe_decode(1, 0.03)
    costs.observe_decode(4, 0.09)
    assert [costs.decode_s(rows) for rows in (0, 1, 2, 3, 4)] == [0.0, 0.03, 0.03, 0.09, 0.09]


def test_rate_settles_on_the_true_one_and_fades() -> None:
    rate = Rate(window_s=10.0)
    assert rate.per_second(0.0) == 0.0
    for tick in range(1000):
        rate.add(5, tick * 0.1)
    assert rate.per_second(99.9) == pytest.approx(50.0, rel=0.01)
    assert rate.per_second(109.9) == pytest.approx(50.0 / math.e, rel=0.01)
