"""The divergence of two lists of the most likely tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.panel_score import PANEL_FORMAT, Logprobs, load_panel, score_position, summarise

VOCABULARY, LISTED = 40, 6


def top_of(weights: list[float]) -> Logprobs:
    """Give the most likely ids of a distribution over the whole vocabulary."""
    total = sum(weights)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))[:LISTED]
    return {token: math.log(weights[token] / total) for token in order}


Weights = st.lists(st.floats(1e-6, 1.0), min_size=VOCABULARY, max_size=VOCABULARY)


@given(Weights)
def test_a_list_is_no_distance_from_itself(weights: list[float]) -> None:
    score = score_position(top_of(weights), top_of(weights))

    assert score.kl == pytest.approx(0.0, abs=1e-12)
    assert score.is_same_top
    assert score.num_unlisted == 0
    assert score.logprob_error == 0.0


@given(Weights, Weights)
def test_the_divergence_is_never_negative_and_counts_unlisted_ids(p: list[float], q: list[float]) -> None:
    reference, served = top_of(p), top_of(q)

    score = score_position(reference, served)

    assert score.kl >= 0.0
    assert score.num_unlisted == len(set(reference) - set(served))


def test_the_divergence_is_exact_where_all_ids_are_listed() -> None:
    reference = {1: math.log(0.5), 2: math.log(0.3)}
    served = {2: math.log(0.6), 1: math.log(0.3)}

    score = score_position(reference, served)

    expected = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.6) + 0.2 * math.log(0.2 / 0.1)
    assert score.kl == pytest.approx(expected, rel=1e-12)
    assert not score.is_same_top
    assert score.logprob_error == pytest.approx((math.log(0.5 / 0.3) + math.log(0.6 / 0.3)) / 2)


def test_lists_without_a_common_id_are_far_apart() -> None:
    reference = {1: math.log(0.6), 2: math.log(0.3)}
    served = {3: math.log(0.9), 4: math.log(0.01)}

    assert score_position(reference, served).kl > 2.0


def test_equal_tops_in_rounded_numbers_are_taken_in_their_order() -> None:
    assert score_position({7: -1.0, 3: -1.0}, {7: -1.0, 3: -1.0}).is_same_top


def test_positions_are_put_together() -> None:
    near = score_position({1: -0.1, 2: -3.0}, {1: -0.1, 2: -3.0})
    far = score_position({1: -0.1, 2: -3.0}, {2: -0.1, 1: -3.0})

    score = summarise([near] * 99 + [far])

    assert score.positions == 100
    assert score.top1 == 0.99
    assert score.max_kl == far.kl
    assert score.mean_kl == pytest.approx(far.kl / 100)
    assert score.p99_kl == near.kl


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "no panel"),
        (json.dumps({"format": PANEL_FORMAT}), "broken panel"),
        (json.dumps({"format": PANEL_FORMAT, "top": 20, "entries": []}), "without positions"),
        (
            json.dumps(
                {
                    "format": PANEL_FORMAT,
                    "top": 1,
                    "entries": [
                        {
                            "name": "x",
                            "ids": [1],
                            "positions": [1],
                            "top_ids": [[1]],
                            "top_logprobs": [[0.0]],
                        }
                    ],
                }
            ),
            "position 1 of 1 ids",
        ),
    ],
)
def test_a_file_that_is_no_panel_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "panel.json"
    path.write_text(content)

    with pytest.raises(BadInput, match=reason):
        load_panel(path)


def test_a_sure_model_s_damage_shows_in_its_unlikely_tokens() -> None:
    reference = {1: -1e-6, 2: -14.0, 3: -15.0}
    served = {1: -1e-6, 2: -17.0, 3: -18.0}

    score = score_position(reference, served)

    assert score.kl < 1e-4
    assert score.logprob_error == pytest.approx(2.0)
