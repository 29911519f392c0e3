"""Penalties on the ids that were seen, against the same over the whole row."""

from __future__ import annotations

from collections import Counter

import numpy as np

from glm53srv.engine.penalties import Penalties, TokenTally, valid_ids
from glm53srv.request import SamplingParams


def test_tally_counts_every_token_while_it_grows() -> None:
    rng = np.random.default_rng(0)
    start, later = rng.integers(0, 5000, 900), rng.integers(0, 5000, 6000).tolist()
    tally = TokenTally(start, 5000)
    expected = Counter(start.tolist())
    for index, token_id in enumerate(later):
        tally.add(token_id)
        expected[token_id] += 1
        if index % 500 == 0 or index == len(later) - 1:
            assert dict(zip(tally.ids.tolist(), tally.counts.tolist(), strict=True)) == expected
    assert len(tally.ids) > 2048  # grown twice


def test_many_tokens_change_the_row_as_over_all_ids() -> None:
    rng = np.random.default_rng(1)
    num_ids = 4000
    row = rng.normal(0.0, 5.0, num_ids).astype(np.float32)
    prompt, output, later = rng.integers(0, num_ids, (3, 1500))
    params = SamplingParams(
        presence_penalty=0.3,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias=((5, 1.5), (6, -2.0), (5, 0.25), (num_ids, 9.0), (-1, 9.0)),
    )
    penalties = Penalties(params, num_ids, prompt.tolist(), output.tolist())
    for token_id in later.tolist():
        penalties.count(token_id)

    expected = row.astype(np.float64)
    seen = np.union1d(np.union1d(prompt, output), later)
    expected[seen] = np.where(expected[seen] > 0, expected[seen] / 1.3, expected[seen] * 1.3)
    counts = np.bincount(np.concatenate([output, later]), minlength=num_ids)
    expected -= 0.7 * counts + 0.3 * (counts > 0)
    expected[5] += 1.75
    expected[6] -= 2.0
    penalties.apply(row)
    np.testing.assert_allclose(
        row, expected, rtol=0, atol=1e-5
    )  # float32 of numbers up to 25: 4 roundings of 1e-6
    assert not penalties.is_neutral


def test_neutral_parameters_change_nothing() -> None:
    penalties = Penalties(SamplingParams(), 10, [1, 2], [3])
    row = np.arange(10, dtype=np.float32)
    penalties.count(4)
    penalties.apply(row)
    assert penalties.is_neutral
    np.testing.assert_array_equal(row, np.arange(10))


def test_ids_outside_the_vocabulary_are_dropped_in_order() -> None:
    assert valid_ids([9, -1, 3, 10, 0], 10).tolist() == [9, 3, 0]
