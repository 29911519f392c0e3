"""Guesses under Triton's interpreter equal the rule, and say nothing of experts that do not exist."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glm53srv.offload.device.gpu.guess_kernel import launch_choice, launch_lists, launch_scores, num_pieces
from glm53srv.offload.device.gpu.launch import RouterWeights, make_landing
from glm53srv.offload.look_ahead import choose_guesses, list_guesses
from glm53srv.offload.offers import ABSENT, BARRED

RECORD, HOME, BUFFER = 36_864, 0x7000_0000_0000, 0x6000_0000_0000


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize(("rows", "hidden", "experts"), [(1, 256, 288), (4, 320, 16), (3, 40, 33)])
def test_scores_are_the_routers(rows: int, hidden: int, experts: int, is_transposed: bool) -> None:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, hidden)).astype(np.float16)
    gate = rng.normal(0.0, hidden**-0.5, (hidden, experts)).astype(np.float16)
    bias = rng.normal(size=experts).astype(np.float32)
    weights = torch.from_numpy(gate.T.copy()).T if is_transposed else torch.from_numpy(gate)
    sums = torch.full((num_pieces(hidden), 4, experts), float("nan"))
    launch_scores(torch.from_numpy(x), RouterWeights(weights, torch.from_numpy(bias)), sums)
    expected = x.astype(np.float64) @ gate.astype(np.float64)
    # float32 sums of up to 320 terms of about 0.06: each rounds by 2^-24 of a sum of a few units at most.
    np.testing.assert_allclose(sums[:, :rows].sum(dim=0).numpy(), expected, atol=2e-5)
    assert torch.isnan(sums[:, rows:]).all()


@pytest.mark.parametrize("seed", range(20))
def test_lists_equal_those_of_the_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, experts, top_k = int(rng.integers(1, 5)), int(rng.integers(8, 300)), int(rng.integers(1, 9))
    logits = rng.integers(-3, 3, (3, 4, experts)).astype(np.float32)  # ties are common
    bias = rng.integers(-1, 2, experts).astype(np.float32) / 4
    scores = 1 / (1 + np.exp(-logits[:, :rows].sum(axis=0))) + bias
    lists = torch.full((4, top_k), 99, dtype=torch.int64)
    launch_lists(torch.from_numpy(logits), torch.from_numpy(bias), lists, rows)
    np.testing.assert_array_equal(lists[:rows].numpy(), list_guesses(scores, top_k))
    assert (lists[rows:] == 99).all()


def test_what_is_no_number_is_not_listed() -> None:
    lists = torch.zeros((1, 4), dtype=torch.int64)
    launch_lists(torch.full((1, 1, 40), float("nan")), torch.zeros(40), lists, 1)
    assert lists.tolist() == [[-1] * 4]


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_equals_the_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, top_k = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    experts, num_ahead = int(rng.integers(top_k, 40)), int(rng.integers(1, 5))
    lists = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int64)
    lists[rng.random(lists.shape) < rng.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1])] = -1
    slots = rng.choice([ABSENT, BARRED, 0, 5], experts, p=[0.4, 0.1, 0.2, 0.3]).astype(np.int32)
    sources, targets, chosen = torch.full((3, 4), 7, dtype=torch.int64)
    count = torch.full((1,), 99, dtype=torch.int32)
    unused = make_landing(torch.zeros((max(1, num_ahead), 1), dtype=torch.uint8))
    fetches = replace(
        unused, address=BUFFER, num_experts=num_ahead, sources=sources, targets=targets, count=count
    )
    given = np.concatenate([lists, np.zeros((4 - rows, top_k), np.int64)])
    allowed, is_closed = rng.integers(0, 6, 2).tolist(), bool(rng.random() < 0.1)
    is_across = bool(rng.random() < 0.5)
    gate = torch.tensor([allowed[False], is_closed, allowed[True]], dtype=torch.int32)
    lists_given, entries = torch.from_numpy(given), torch.from_numpy(slots)
    launch_choice(lists_given, rows, entries, HOME, RECORD, fetches, chosen, gate, is_across=is_across)
    expected = choose_guesses(lists, slots, 0 if is_closed else min(allowed[is_across], num_ahead))
    number = int(count)
    assert number == len(expected)
    assert chosen.tolist() == [*expected.tolist(), *[7] * (4 - number)]
    assert sources.tolist() == [*(HOME + expected.astype(np.int64) * RECORD).tolist(), *[7] * (4 - number)]
    assert targets[:number].tolist() == [BUFFER + index * RECORD for index in range(number)]
