"""Drawn guesses: as many right ones as asked for, and wrong ones that are recent."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.bench_model.guesses import guess_routes
from glm53srv.bench_model.routes import NUM_EXPERTS, generate, route_model

ROUTES = generate(200, seed=1, model=route_model(num_layers=6))


def is_right(guesses: np.ndarray) -> np.ndarray:
    return np.asarray((guesses[..., :, None] == ROUTES[..., None, :]).any(-1))


@pytest.mark.parametrize("recall", [0.0, 0.67, 1.0])
def test_the_recall_is_that_which_was_asked_for(recall: float) -> None:
    # 9,600 picks: the share's standard deviation is .005.
    assert abs(is_right(guess_routes(ROUTES, recall)).mean() - recall) < 0.02


def test_guesses_of_a_row_are_distinct_experts() -> None:
    guesses = guess_routes(ROUTES, 0.5)
    assert guesses.shape == ROUTES.shape
    assert guesses.max() < NUM_EXPERTS
    ordered = np.sort(guesses, axis=-1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()


def test_right_guesses_stand_at_any_rank() -> None:
    by_rank = is_right(guess_routes(ROUTES, 0.67)).mean(axis=(0, 1))
    assert by_rank.max() - by_rank.min() < 0.1


def test_a_wrong_guess_is_an_expert_of_late() -> None:
    guesses = guess_routes(ROUTES, 0.67)
    wrong = ~is_right(guesses)
    recent = np.stack([(guesses[t][..., None] == ROUTES[t - 1][:, None]).any(-1) for t in range(1, 200)])
    # About 2.6 of 8 are wrong, of 8 picks before about 5 are not picked again: nearly all find one.
    assert recent[wrong[1:]].mean() > 0.9


def test_a_seed_gives_the_same_guesses_again_and_another_seed_others() -> None:
    first, again, other = (guess_routes(ROUTES, 0.67, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(("recall", "num_experts"), [(1.1, NUM_EXPERTS), (-0.1, NUM_EXPERTS), (0.5, 15)])
def test_what_cannot_be_drawn_is_refused(recall: float, num_experts: int) -> None:
    with pytest.raises(ValueError, match="recall"):
        guess_routes(ROUTES, recall, num_experts=num_experts)
