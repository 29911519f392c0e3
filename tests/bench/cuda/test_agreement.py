"""Logits as they are recorded, and the verdicts: a difference is found, nothing that is no number passes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.cuda.agreement import Agreement, Logits, agreement, difference, recording, worst_of


def logits(seed: int, rows: int = 400) -> Logits:
    drawn = np.random.default_rng(seed).normal(size=(rows, 50)) * 3
    return drawn.astype(np.float32)


def test_equal_bits_differ_by_nothing() -> None:
    assert difference(logits(1), logits(1).copy()) == 0.0


def test_one_changed_value_is_found() -> None:
    changed = logits(1)
    changed[399, 49] = np.nextafter(changed[399, 49], np.float32(100))
    found = difference(changed, logits(1))
    assert 0 < found < 1e-5


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_never_equal(wrong: float) -> None:
    broken = logits(1)
    broken[3, 3] = wrong
    for pair in ((broken, logits(1)), (logits(1), broken), (broken, broken)):
        assert math.isnan(difference(*pair))


def test_shapes_that_differ_are_never_equal() -> None:
    assert math.isnan(difference(logits(1)[:1], logits(1)[:2]))  # numpy alone would stretch the one row


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_nan_among_differences_stays(place: int) -> None:
    values = [0.0, 0.25, 0.0]
    assert worst_of(*values) == 0.25
    values[place] = math.nan
    assert math.isnan(worst_of(*values))


def test_the_same_logits_agree_whole_and_a_shift_changes_nothing() -> None:
    found = agreement(logits(2), logits(2) + np.float32(5))
    assert found.top1 == 1.0
    assert found.max_kl == pytest.approx(0.0, abs=1e-6)
    assert found.is_good


def test_kl_is_that_of_two_known_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    found = agreement(np.log(p)[None].astype(np.float32), np.log(q)[None].astype(np.float32))
    assert found.mean_kl == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert (found.num_positions, found.top1) == (1, 0.0)
    assert not found.is_good


@pytest.mark.parametrize(
    "found",
    [
        Agreement(1, 0.0021, 0.01, 1.0, 1.0),
        Agreement(1, 0.001, 0.031, 1.0, 1.0),
        Agreement(1, 0.001, 0.01, 1.0, 0.989),
        Agreement(1, math.nan, 0.01, 1.0, 1.0),
        Agreement(1, 0.001, math.nan, 1.0, 1.0),
        Agreement(1, 0.001, 0.01, 1.0, math.nan),
    ],
)
def test_every_target_counts(found: Agreement) -> None:
    assert not found.is_good


def test_other_prompts_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        agreement(logits(1), logits(1, rows=399))
    with pytest.raises(ValueError, match="cannot be compared"):
        agreement(logits(1)[:0], logits(1)[:0])


class Model:
    """Gives the same rows again and again, as the engine's does: borrowed until the next step."""

    def __init__(self) -> None:
        self.rows = np.zeros((2, 3), np.float32)

    def to_host(self, sent: float) -> np.ndarray:
        self.rows[:] = sent
        return self.rows


def test_each_step_inside_is_recorded_and_none_behind() -> None:
    model, found = Model(), list[np.ndarray]()
    model.to_host(1.0)
    with recording(model, found):
        assert model.to_host(2.0) is model.rows
        model.to_host(3.0)
    model.to_host(4.0)
    assert [rows[0, 0] for rows in found] == [2.0, 3.0]
    assert found[0].shape == (2, 3)
