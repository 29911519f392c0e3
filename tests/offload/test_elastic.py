"""The loan's transition table, every phase with every event."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.offload.elastic import (
    ACTIVATION_MARGIN,
    ElasticLoan,
    LoanParams,
    Phase,
    Resize,
    fit_loan,
)
from glm53srv.offload.vram_plan import VramPlan

PLAN = VramPlan(256, 32, 192, 48, 96, ())


def full() -> ElasticLoan:
    return ElasticLoan(PLAN)


def called(num_slots: int = 96) -> ElasticLoan:
    loan = full()
    loan.begin(num_slots)
    return loan


def lent(num_slots: int = 96) -> ElasticLoan:
    loan = called(num_slots)
    loan.poll(is_lent=True)
    return loan


def test_full_begin_calls_slots() -> None:
    loan = full()
    assert loan.begin(96) == Resize(shrink=96)
    assert loan.phase is Phase.CALLED


def test_full_begin_without_a_loan_stays_full() -> None:
    loan = full()
    assert loan.begin(0) == Resize()
    assert loan.phase is Phase.FULL
    assert loan.poll(is_lent=True)


def test_called_poll_waits_until_the_slots_are_lent() -> None:
    loan = called()
    seen = [(loan.poll(is_lent), loan.phase) for is_lent in (False, False, True)]
    assert seen == [(False, Phase.CALLED), (False, Phase.CALLED), (True, Phase.LENT)]


@pytest.mark.parametrize("is_more_waiting", [False, True])
def test_called_end_gives_everything_back(is_more_waiting: bool) -> None:
    loan = called()
    assert loan.end(is_more_waiting) == Resize(grow=96)
    assert (loan.phase, loan.num_lent) == (Phase.FULL, 0)


def test_called_begin_is_an_error() -> None:
    with pytest.raises(ValueError):
        called().begin(32)


def test_lent_begin_of_a_larger_chunk_calls_the_difference() -> None:
    loan = lent(96)
    assert loan.begin(160) == Resize(shrink=64)
    assert (loan.phase, loan.num_lent) == (Phase.CALLED, 160)


@pytest.mark.parametrize("num_slots", [0, 32, 96])
def test_lent_begin_of_a_smaller_chunk_keeps_the_loan(num_slots: int) -> None:
    loan = lent(96)
    assert loan.begin(num_slots) == Resize()
    assert (loan.phase, loan.num_lent) == (Phase.LENT, 96)


def test_lent_end_keeps_the_loan_for_a_waiting_chunk() -> None:
    loan = lent()
    assert loan.end(is_more_waiting=True) == Resize()
    assert loan.phase is Phase.LENT


def test_lent_end_gives_everything_back() -> None:
    loan = lent()
    assert loan.end(is_more_waiting=False) == Resize(grow=96)
    assert (loan.phase, loan.num_lent) == (Phase.FULL, 0)


def test_full_end_changes_nothing() -> None:
    assert full().end(is_more_waiting=False) == Resize()


@pytest.mark.parametrize("num_slots", [-1, 193])
def test_impossible_loans_are_refused(num_slots: int) -> None:
    with pytest.raises(ValueError):
        full().begin(num_slots)


def test_a_random_walk_conserves_slots() -> None:
    rng = np.random.default_rng(0)
    loan, outside = full(), 0
    for _ in range(20_000):
        event = rng.integers(3)
        if event == 0 and loan.phase is not Phase.CALLED:
            change = loan.begin(int(rng.integers(0, 193)))
        elif event == 1:
            loan.poll(bool(rng.integers(2)))
            continue
        else:
            change = loan.end(bool(rng.integers(2)))
        assert change.shrink == 0 or change.grow == 0
        outside += change.shrink - change.grow
        assert outside == loan.num_lent <= PLAN.elastic_slots
        assert (loan.phase is Phase.FULL) == (loan.num_lent == 0)


def test_memory_of_a_chunk_is_fitted_as_a_fixed_part_and_one_per_token() -> None:
    fitted = fit_loan([(512, 100_000_000 + 512 * 300_000), (1024, 100_000_000 + 1024 * 300_000)])
    assert fitted.activation_bytes_per_token == int(300_000 * ACTIVATION_MARGIN) + 1
    assert fitted.free_activation_bytes == LoanParams().free_activation_bytes - 100_000_000


def test_one_measured_chunk_counts_as_if_nothing_were_fixed() -> None:
    fitted = fit_loan([(64, 64 * 1000)])
    assert fitted.activation_bytes_per_token == int(1000 * ACTIVATION_MARGIN) + 1
    assert fitted.free_activation_bytes == LoanParams().free_activation_bytes


def test_a_longer_chunk_that_took_less_leaves_a_loan_that_is_none() -> None:
    fitted = fit_loan([(512, 2**31), (1024, 2**30)])
    assert fitted.activation_bytes_per_token >= 1
    assert fitted.free_activation_bytes == 0
