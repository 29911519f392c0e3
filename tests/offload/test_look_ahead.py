"""The rule of guesses against its sentences, and what it does to split and offers."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.offload.look_ahead import choose_guesses, list_guesses
from glm53srv.offload.offers import ABSENT, BARRED, RING_SLOTS, Offers, keep_picks
from glm53srv.offload.split import Lane, split_picks

TOP_K = 4


def plain_choice(lists: np.ndarray, entries: np.ndarray, num_ahead: int) -> list[int]:
    """The sentences, one expert at a time."""
    chosen: list[int] = []
    seen: set[int] = set()
    for rank in range(lists.shape[1]):
        for row in range(lists.shape[0]):
            expert = int(lists[row, rank])
            if expert < 0 or expert in seen:
                continue
            seen.add(expert)
            if entries[expert] == ABSENT and len(chosen) < num_ahead:
                chosen.append(expert)
    return chosen


def test_guesses_equal_those_of_the_sentences() -> None:
    rng = np.random.default_rng(0)
    num_chosen = 0
    for _ in range(500):
        rows, experts = int(rng.integers(1, 5)), int(rng.integers(TOP_K, 20))
        lists = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(rows)])
        lists[rng.random(lists.shape) < 0.1] = -1
        entries = rng.choice([ABSENT, BARRED, 3], experts).astype(np.int32)
        num_ahead = int(rng.integers(0, 5))
        found = choose_guesses(lists, entries, num_ahead)
        assert found.tolist() == plain_choice(lists, entries, num_ahead)
        num_chosen += len(found)
    assert num_chosen > 500


@pytest.mark.parametrize("entry", [0, 7, BARRED])
def test_what_has_a_slot_or_will_have_one_is_not_fetched(entry: int) -> None:
    entries = np.array([ABSENT, entry, ABSENT], np.int32)
    assert choose_guesses(np.array([[1, 2]]), entries, 1).tolist() == [2]


def test_an_expert_that_two_rows_guess_is_fetched_once() -> None:
    entries = np.full(9, ABSENT, np.int32)
    assert choose_guesses(np.array([[5, 6], [5, 7]]), entries, 4).tolist() == [5, 6, 7]


def test_a_better_rank_goes_first_whatever_its_row() -> None:
    entries = np.full(9, ABSENT, np.int32)
    entries[1] = 0
    assert choose_guesses(np.array([[1, 2], [3, 4]]), entries, 2).tolist() == [3, 2]


def test_lists_are_the_best_scores_the_lower_expert_first() -> None:
    scores = np.array([[0.5, 2.0, 0.5, 1.0], [-1.0, -1.0, -3.0, -1.0]], np.float32)
    assert list_guesses(scores, 3).tolist() == [[1, 3, 0], [0, 1, 3]]


def split_one(
    fetched: list[int], slots: list[int], picks: list[int], table: np.ndarray
) -> tuple[object, ...]:
    heat = np.arange(len(slots), dtype=np.int32)[None]
    one = np.array([fetched], np.int32)
    split = split_picks(np.array([picks]), np.array([slots], np.int32), heat, table, one)
    return (
        split.lanes[0].tolist(),
        (int(split.num_hits[0]), int(split.num_link[0]), int(split.num_cpu[0])),
        split.is_ahead[0].tolist(),
    )


def test_a_right_guess_is_no_miss_to_be_shared_out_and_came_over_the_link() -> None:
    every_miss = np.arange(9, dtype=np.int32)[None].repeat(9, axis=0)
    lanes, counts, ahead = split_one([3], [0, -1, -1, -1], [0, 1, 3, 3], every_miss)
    assert lanes == [Lane.VRAM, Lane.CPU, Lane.LINK, Lane.LINK]  # the hottest, and every pick of it
    assert counts == (1, 1, 1)
    assert ahead == [False, False, True, False]


def test_a_wrong_guess_and_a_guess_with_a_slot_change_nothing() -> None:
    every_miss = np.arange(9, dtype=np.int32)[None].repeat(9, axis=0)
    usual = split_one([], [0, -1, -1, -1], [0, 1, 3, 3], every_miss)
    assert split_one([2, -1], [0, -1, -1, -1], [0, 1, 3, 3], every_miss) == usual
    assert split_one([0], [0, -1, -1, -1], [0, 1, 3, 3], every_miss) == usual


def test_the_split_looks_up_a_right_guess_among_the_hits() -> None:
    table = np.zeros((9, 9), np.int32)
    table[2, 2] = 2  # one slot and one guess, two misses
    lanes, counts, _ = split_one([1], [0, -1, -1, -1], [0, 1, 2, 3], table)
    assert lanes == [Lane.VRAM, Lane.LINK, Lane.CPU, Lane.CPU]
    assert counts == (1, 1, 2)


@pytest.mark.parametrize(("num_landing", "takers"), [(0, [1]), (1, [0, 1]), (2, [0, 1, 2])])
def test_a_right_guess_takes_an_offer_and_no_landing_buffer(num_landing: int, takers: list[int]) -> None:
    picks, entries = np.array([[5, 6, 7]]), np.full((1, 8), ABSENT, np.int32)
    heat, no_cpu = np.zeros((1, 8), np.int32), np.zeros((4, 4), np.int32)
    split = split_picks(picks, entries, heat, no_cpu, np.array([[6]], np.int32))
    offers = Offers(0, 0, 3, np.arange(40, 40 + RING_SLOTS, dtype=np.int32))
    keeping = keep_picks(picks, split, entries, heat, offers, 0, num_landing)
    assert np.flatnonzero(keeping.slots[0] >= 0).tolist() == takers
    assert keeping.slots[0, takers].tolist() == [40 + number for number in range(len(takers))]
