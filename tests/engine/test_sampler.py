"""SamplerBank: against a naive reference, by distribution, and by its promises on seeds and ties."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from glm53srv.engine.base import SampledToken
from glm53srv.engine.sampler import LOGPROB_FLOOR, SamplerBank, uniform
from glm53srv.errors import EngineError, InvalidRequest
from glm53srv.request import SamplingParams
from tests.builders import make_start
from tests.engine import sampling_reference

Logits = NDArray[np.float32]

GREEDY = SamplingParams(temperature=0.0)


def sample_one(
    row: Sequence[float] | Logits,
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    num_valid_ids: int | None = None,
) -> SampledToken:
    """Sample the next token of one sequence in a bank of its own."""
    logits = np.asarray(row, dtype=np.float32)[None, :]
    bank = SamplerBank(logits.shape[1], eos_token_ids, num_valid_ids)
    bank.start(0, make_start(params, seed=seed, prompt_ids=prompt_ids, output_ids=output_ids))
    return bank.sample([0], logits)[0]


def reference_logits(
    row: Sequence[float], params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> list[float]:
    """Penalties and bias, one id at a time."""
    counts = Counter(output_ids)
    logits = []
    for token_id, logit in enumerate(row):
        if token_id in counts or token_id in prompt_ids:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token_id]
        logit -= params.presence_penalty * (counts[token_id] > 0)
        logits.append(logit + sum(bias for biased_id, bias in params.logit_bias if biased_id == token_id))
    return logits


def reference_probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature and filters by full ranking; gives the probability of each id."""
    ranking = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    best = logits[ranking[0]]
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    if params.top_k > 0:
        ranking = ranking[: params.top_k]
    total, mass, kept = math.fsum(weights[token_id] for token_id in ranking), 0.0, []
    for token_id in ranking:
        kept.append(token_id)
        mass += weights[token_id]
        if mass >= params.top_p * total and params.top_p < 1:
            break
    kept_set = {token_id for token_id in kept if weights[token_id] >= params.min_p}
    kept_total = math.fsum(weights[token_id] for token_id in kept_set)
    return [weight / kept_total if index in kept_set else 0.0 for index, weight in enumerate(weights)]


def chi_square_limit(degrees: int) -> float:
    """Give the value that chi square exceeds once in 10,000 (Wilson and Hilferty 1931)."""
    z = 3.719
    return float(degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3)


# Halves and quarters: exact in float32, so that reference and sampler see the same ties.
exact_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=2, max_size=24)
exact_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.06, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
)


@settings(max_examples=600, deadline=None)
@given(exact_logits, exact_params, st.integers(0, 2**64 - 1), st.data())
def test_token_is_the_one_the_reference_draws(
    row: list[float], params: SamplingParams, seed: int, data: st.DataObject
) -> None:
    ids = st.integers(0, len(row) - 1)
    prompt_ids, output_ids = data.draw(st.lists(ids, max_size=4)), data.draw(st.lists(ids, max_size=6))
    bias = data.draw(st.lists(st.tuples(ids, st.sampled_from([-3.0, 0.5, 2.0])), max_size=3))
    params = replace(params, logit_bias=tuple(bias))

    logits = reference_logits(row, params, prompt_ids, output_ids)
    cumulative = np.cumsum(reference_probabilities(logits, params))
    u = uniform(seed, len(output_ids))
    assume(np.abs(cumulative - u).min() > 1e-9)  # rounding decides on a border
    expected = int((cumulative <= u).sum())

    token = sample_one(row, params, seed=seed, prompt_ids=prompt_ids, output_ids=output_ids)
    assert token.token_id == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.1),
        SamplingParams(temperature=1.1, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    row = np.random.default_rng(3).normal(0.0, 1.0, 20).astype(np.float32)
    expected = np.array(reference_probabilities(row.tolist(), params))
    num_draws = 4000
    bank = SamplerBank(20, ())
    bank.start(0, make_start(params, seed=12345))

    drawn = [bank.sample([0], row[None, :])[0].token_id for _ in range(num_draws)]

    counts = np.bincount(drawn, minlength=20)
    assert counts[expected == 0].sum() == 0
    is_common = expected * num_draws >= 5  # the test's own condition; the rest goes into one bin
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum()) * num_draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert len(wanted) >= 4
    assert ((observed - wanted) ** 2 / wanted).sum() < chi_square_limit(len(wanted) - 1)


@pytest.mark.parametrize("scale", [0.3, 1.5], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0.7, top_k=2000, top_p=0.9),
        SamplingParams(min_p=0.1),
    ],
    ids=str,
)
def test_draws_from_a_large_vocabulary_follow_the_distribution(params: SamplingParams, scale: float) -> None:
    rng = np.random.default_rng(4)
    row = (scale * rng.standard_normal(20_000)).astype(np.float32)
    row[rng.choice(20_000, 30, replace=False)] += np.float32(4.0 * scale)
    expected = sampling_reference.probabilities(row, params)
    num_draws, num_bins = 4000, 40
    # Neighbouring ids share a bin: nearly as many bins as a heavy id leaves, all of about the same weight.
    bin_of = np.minimum((np.cumsum(expected) - expected / 2) * num_bins, num_bins - 1).astype(np.int64)
    bank = SamplerBank(20_000, ())
    bank.start(0, make_start(params, seed=99))

    drawn = np.array([bank.sample([0], row[None, :])[0].token_id for _ in range(num_draws)])

    assert (expected[drawn] > 0).all()
    observed = np.bincount(bin_of[drawn], minlength=num_bins)
    wanted = np.bincount(bin_of, weights=expected, minlength=num_bins) * num_draws
    observed, wanted = observed[wanted >= 5], wanted[wanted >= 5]
    assert len(wanted) >= 8
    assert ((observed - wanted) ** 2 / wanted).sum() < chi_square_limit(len(wanted) - 1)


def test_uniform_numbers_are_uniform_over_seeds_and_over_indices() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(4000)], [uniform(7, index) for index in range(4000)]):
        counts = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
        assert ((counts - 200.0) ** 2 / 200.0).sum() < chi_square_limit(19)


def test_uniform_numbers_of_a_seed_never_change() -> None:
    # A user who notes a seed gets the same text from the next release and another numpy.
    drawn = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**64 - 1, 100_000)]
    assert drawn == [0.011546754286331562, 0.5023796042735054, 0.3035680343067586, 0.6168164694809481]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sample_one([0.0, 3.0, 1.0, 3.0], GREEDY).token_id == 1


def test_top_k_of_equals_keeps_exactly_k_lowest_ids() -> None:
    params = SamplingParams(top_k=2)
    drawn = {sample_one([1.0, 5.0, 5.0, 5.0, 5.0], params, seed=seed).token_id for seed in range(100)}
    assert drawn == {1, 2}


def test_top_p_of_equals_keeps_the_shortest_prefix() -> None:
    # Four equal weights; three of them are the first to hold 0.6.
    params = SamplingParams(top_p=0.6)
    drawn = {sample_one([5.0, 5.0, -50.0, 5.0, 5.0], params, seed=seed).token_id for seed in range(200)}
    assert drawn == {0, 1, 3}


def test_top_p_on_a_large_vocabulary_equals_the_full_ranking() -> None:
    rng = np.random.default_rng(5)
    for scale in (0.1, 1.0, 4.0):
        row = rng.normal(0.0, scale, 20_000).astype(np.float32).round(2)  # rounded: many ties
        params = SamplingParams(temperature=0.9, top_p=0.9)
        cumulative = np.cumsum(reference_probabilities(row.tolist(), params))
        for seed in range(40):
            expected = int((cumulative <= uniform(seed, 0)).sum())
            assert sample_one(row, params, seed=seed).token_id == expected


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    row = [-80.0, 60.0, 59.999, -np.inf]
    assert sample_one(row, SamplingParams(temperature=1e-300)).token_id == 1


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    rows = np.random.default_rng(0).normal(0.0, 1.0, (50, 1, 30)).astype(np.float32)

    def run(seed: int) -> list[int]:
        bank = SamplerBank(30, ())
        bank.start(2, make_start(seed=seed))
        return [bank.sample([2], row)[0].token_id for row in rows]

    assert run(17) == run(17)
    assert run(17) != run(18)


PENALISED = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    num_logprobs=3,
    min_tokens=6,
)


def test_tokens_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(0.0, 2.0, (20, 3, 25)).astype(np.float32)
    starts = [make_start(PENALISED, seed=slot, prompt_ids=[slot, 9]) for slot in range(3)]
    together = SamplerBank(25, (1,))
    for slot, start in enumerate(starts):
        together.start(slot, start)
    batched = [together.sample([2, 0, 1], step[[2, 0, 1]]) for step in rows]

    for slot, start in enumerate(starts):
        alone = SamplerBank(25, (1,))
        alone.start(slot, start)
        single = [alone.sample([slot], step[[slot]])[0] for step in rows]
        assert single == [next(token for token in step if token.slot == slot) for step in batched]


@pytest.mark.parametrize("num_before", [0, 1, 5, 11])
def test_tokens_do_not_depend_on_preemption(num_before: int) -> None:
    rows = np.random.default_rng(2).normal(0.0, 2.0, (12, 1, 25)).astype(np.float32)
    whole = SamplerBank(25, (1,))
    whole.start(0, make_start(PENALISED, seed=4))
    expected = [whole.sample([0], row)[0] for row in rows]
    output_ids = [token.token_id for token in expected[:num_before]]

    again = SamplerBank(25, (1,))
    again.start(0, make_start(PENALISED, seed=4, output_ids=output_ids))
    assert [again.sample([0], row)[0] for row in rows[num_before:]] == expected[num_before:]


def test_presence_and_frequency_ignore_the_prompt_and_repetition_counts_it() -> None:
    row = [2.0, 1.9, 0.0]
    for params in (
        SamplingParams(temperature=0, presence_penalty=1),
        SamplingParams(temperature=0, frequency_penalty=1),
    ):
        assert sample_one(row, params, prompt_ids=[0]).token_id == 0
        assert sample_one(row, params, output_ids=[0]).token_id == 1
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    assert sample_one(row, params, prompt_ids=[0]).token_id == 1


def test_sampled_tokens_are_counted() -> None:
    bank = SamplerBank(3, ())
    bank.start(0, make_start(SamplingParams(temperature=0, frequency_penalty=1.0)))
    row = np.array([[2.5, 1.75, 0.0]], dtype=np.float32)
    # 2.5 1.5* 0.5 against 1.75 0.75: each draw costs its token one.
    assert [bank.sample([0], row)[0].token_id for _ in range(4)] == [0, 1, 0, 1]


def test_stop_ids_are_banned_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(3,))
    row = [0.0, 9.0, 1.0, 8.0]
    tokens = [
        sample_one(row, params, output_ids=[2] * count, eos_token_ids=[1]).token_id for count in range(3)
    ]
    assert tokens == [2, 2, 1]


def test_ignore_eos_does_not_ban_the_end_id() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert sample_one([0.0, 9.0], params, eos_token_ids=[1]).token_id == 1


def test_ban_gives_way_when_nothing_else_is_left() -> None:
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=(0, 1), num_logprobs=1)
    token = sample_one([0.0, 9.0], params)
    assert token.token_id == 1
    assert token.logprobs is not None
    assert math.isfinite(token.logprobs.logprob)


def test_logit_bias_forces_and_forbids() -> None:
    row = [0.0, 20.0, 0.0]
    assert sample_one(row, SamplingParams(temperature=0, logit_bias=((2, 100.0),))).token_id == 2
    drawn = {
        sample_one(row, SamplingParams(logit_bias=((1, -100.0),)), seed=seed).token_id for seed in range(50)
    }
    assert drawn == {0, 2}


def test_padding_ids_are_never_drawn_or_reported() -> None:
    row = [0.0, 1.0, 50.0, 60.0]
    params = SamplingParams(temperature=0, num_logprobs=4, logit_bias=((3, 100.0),), stop_token_ids=(3,))
    token = sample_one(row, params, num_valid_ids=2, prompt_ids=[3], output_ids=[2])
    assert token.token_id == 1
    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 0]


def test_logprobs_are_log_softmax_before_temperature_and_filters() -> None:
    row = np.random.default_rng(8).normal(0.0, 3.0, 50).astype(np.float32)
    token = sample_one(row, SamplingParams(temperature=5.0, top_k=3, num_logprobs=5), seed=1)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(exact[token.token_id], abs=1e-12)
    best = np.argsort(-row, kind="stable")[:5]
    assert [token_id for token_id, _ in token.logprobs.top] == best.tolist()
    assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(exact[best].tolist(), abs=1e-12)


def test_logprobs_come_after_bias_and_penalties() -> None:
    token = sample_one([1.0, 1.0], replace(GREEDY, num_logprobs=2, logit_bias=((1, 3.0),)))
    assert token.logprobs is not None
    best_id, best_logprob = token.logprobs.top[0]
    assert best_id == 1
    assert best_logprob == pytest.approx(-math.log1p(math.exp(-3.0)))


def test_zero_logprobs_give_the_sampled_one_alone() -> None:
    token = sample_one([1.0, 1.0], replace(GREEDY, num_logprobs=0))
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert sample_one([1.0, 1.0], GREEDY).logprobs is None


def test_more_logprobs_than_ids_give_all_ids() -> None:
    token = sample_one([1.0, 2.0], replace(GREEDY, num_logprobs=20))
    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 0]


def test_logprob_of_a_banned_id_is_finite_json() -> None:
    params = SamplingParams(temperature=0, min_tokens=1, num_logprobs=2)
    token = sample_one([9.0, 1.0], params, eos_token_ids=[0])
    assert token.logprobs is not None
    assert token.logprobs.top == ((1, 0.0), (0, LOGPROB_FLOOR))
    json.dumps(asdict(token), allow_nan=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), PENALISED], ids=["greedy", "draw", "penalised"])
def test_non_finite_logits_are_an_engine_error(bad: float, params: SamplingParams) -> None:
    row = [0.0] * 10
    row[4] = bad
    with pytest.raises(EngineError, match="non-finite"):
        sample_one(row, params)


def test_a_row_of_minus_infinity_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="non-finite"):
        sample_one([-np.inf, -np.inf], GREEDY)


def test_minus_infinity_is_never_drawn() -> None:
    drawn = {
        sample_one([-np.inf, 0.0, -np.inf, 0.0], SamplingParams(), seed=seed).token_id for seed in range(50)
    }
    assert drawn == {1, 3}


def test_logits_of_the_engine_are_not_changed() -> None:
    logits = np.random.default_rng(0).normal(0.0, 1.0, (1, 25)).astype(np.float32)
    before = logits.copy()
    bank = SamplerBank(25, (1,))
    bank.start(0, make_start(PENALISED))
    bank.sample([0], logits)
    np.testing.assert_array_equal(logits, before)


def test_release_forgets_counts_and_ignores_unknown_slots() -> None:
    bank = SamplerBank(2, ())
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    row = np.array([[1.0, 0.0]], dtype=np.float32)
    bank.start(0, make_start(params))
    bank.sample([0], row)
    bank.release(0)
    bank.release(3)
    bank.start(0, make_start(params))
    assert bank.sample([0], row)[0].token_id == 0


@settings(max_examples=200, deadline=None)
@given(
    row=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=12),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 100.0]),
        top_k=st.sampled_from([0, 1, 2]),
        top_p=st.sampled_from([5e-324, 0.5, 1.0]),
        min_p=st.sampled_from([0.0, 5e-324, 1.0]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
        frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
        repetition_penalty=st.sampled_from([0.01, 1.0, 100.0]),
        logit_bias=st.sampled_from([(), ((0, -100.0), (1, 100.0))]),
        num_logprobs=st.just(2),
    ),
    seen=st.lists(st.integers(0, 1), max_size=6),
)
def test_no_request_can_make_good_logits_look_broken(
    row: list[float], params: SamplingParams, seen: list[int]
) -> None:
    """An error here ends the engine and with it everybody's streams, so a request must not be able to."""
    token = sample_one(row, params, prompt_ids=seen, output_ids=seen, eos_token_ids=[1])
    assert 0 <= token.token_id < len(row)
    assert token.logprobs is not None
    assert all(math.isfinite(value) for _, value in token.logprobs.top)


def test_a_penalty_that_would_make_logits_infinite_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty must be between 0\.01 and 100"):
        SamplingParams(repetition_penalty=5e-324)


@pytest.mark.parametrize("num_ids", [1024, 2047, 2048, 20_000])
@pytest.mark.parametrize("top_k", [1, 2, 20, 256, 257, 1000])
def test_top_logprobs_of_many_ids_are_the_first_of_the_ranking(num_ids: int, top_k: int) -> None:
    generator = np.random.default_rng(num_ids + top_k)
    for row in (
        generator.standard_normal(num_ids, dtype=np.float32),
        generator.integers(0, 3, num_ids).astype(np.float32),  # nearly all are tied
        np.sort(generator.standard_normal(num_ids, dtype=np.float32)),  # the largest lie in few groups
    ):
        bias = tuple((token_id, -100.0) for token_id in range(0, num_ids, num_ids // 3))
        params = SamplingParams(temperature=0.0, logit_bias=bias, num_logprobs=min(top_k, 20))
        shown = sample_one(row, params).logprobs
        assert shown is not None
        biased = row.copy()
        biased[[token_id for token_id, _ in bias]] -= 100.0
        ranking = np.lexsort((np.arange(num_ids), -biased))
        assert [token_id for token_id, _ in shown.top] == ranking[: min(top_k, 20)].tolist()
        drawn = sample_one(row, replace(params, temperature=5.0, top_k=top_k, num_logprobs=None), seed=top_k)
        assert drawn.token_id in ranking[:top_k]
