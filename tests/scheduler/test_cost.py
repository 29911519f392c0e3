"""StepCosts and Rate."""

from __future__ import annotations

import math

import pytest

from glm53srv.scheduler.cost import Rate, StepCosts


def test_unknown_costs_give_one_layer() -> None:
    costs = StepCosts()
    assert costs.layer_s(100) is None
    assert costs.layers_within(10.0, 100, 45) == 1


def test_layers_fill_the_budget_and_not_more() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, 2, 0.25)  # 0.125 s a layer, exact in binary
    assert costs.layers_within(0.5, 100, 45) == 4
    assert costs.layers_within(0.49, 100, 45) == 3
    assert costs.layers_within(100.0, 100, 45) == 45
    assert costs.layers_within(0.01, 100, 45) == 1
    assert costs.layers_within(-1.0, 100, 45) == 1


def test_engine_that_reports_no_time_runs_all_layers() -> None:
    costs = StepCosts()
    costs.observe_prefill(100, 2, 0.0)
    assert costs.layers_within(0.1, 100, 45) == 45
    assert costs.layers_within(-0.1, 100, 45) == 45


def test_chunk_lengths_are_learned_apart() -> None:
    costs = StepCosts()
    costs.observe_prefill(8192, 1, 0.2)
    costs.observe_prefill(5, 1, 0.01)
    assert costs.layer_s(8192) == pytest.approx(0.2)
    assert costs.layer_s(5) == pytest.approx(0.01)


@pytest.mark.parametrize("fixed_s", [0.0, 0.007])
@pytest.mark.parametrize("known", [3, 64, 5000])
def test_unseen_length_is_never_underestimated(known: int, fixed_s: float) -> None:
    def true_s(num_tokens: int) -> float:
        return fixed_s + 2e-5 * num_tokens

    costs = StepCosts()
    costs.observe_prefill(known, 1, true_s(known))
    for num_tokens in (1, 4, 32, 128, 1000, 8192):
        estimate = costs.layer_s(num_tokens)
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
