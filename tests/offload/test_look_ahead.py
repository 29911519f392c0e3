"""The rule of guesses against its sentences, and what it does to split and offers."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.offload.look_ahead import (
    MAX_AHEAD,
    NUM_AHEAD,
    AheadTuner,
    choose_guesses,
    fits_gap,
    list_guesses,
)
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


COPY_MS = 0.175
"""An expert by an H200's copy engine."""
ACROSS = np.array([False, False, False, True] * 3)


@pytest.mark.parametrize(
    ("gap_ms", "copy_ms", "expected"),
    [
        (0.137, COPY_MS, NUM_AHEAD),  # the H200's gaps, traced on 30 November 2026: one row,
        (0.262, COPY_MS, NUM_AHEAD),  # with a latent attention,
        (0.169, COPY_MS, NUM_AHEAD),  # two rows,
        (0.450, COPY_MS, NUM_AHEAD + 1),
        (0.244, 0.378, 1),  # a slower GPU behind PCIe 4.0 x16
        (0.244, 0.75, 0),  # x8
        (0.488, 0.75, 1),
        (0.488, 1.5, 0),
        (0.0, COPY_MS, 0),
    ],
)
def test_what_is_fetched_fits_the_gap(gap_ms: float, copy_ms: float, expected: int) -> None:
    assert fits_gap(gap_ms, copy_ms) == expected


def gaps(plain_ms: float, across_ms: float) -> np.ndarray:
    found = np.where(ACROSS, across_ms, plain_ms)
    found[0] = np.nan  # nothing stands in front of the first layer
    return found


def test_a_machine_without_times_fetches_what_it_is_told_to() -> None:
    tuner = AheadTuner(COPY_MS)
    assert tuner.most(1) == (MAX_AHEAD, MAX_AHEAD)
    tuner.observe(1, np.full(len(ACROSS), np.nan), ACROSS)
    assert tuner.most(1) == (MAX_AHEAD, MAX_AHEAD)


def test_without_the_time_of_a_copy_no_gap_says_how_many_it_holds() -> None:
    tuner = AheadTuner(None)
    tuner.observe(1, gaps(0.01, 0.01), ACROSS)
    assert tuner.most(1) == (MAX_AHEAD, MAX_AHEAD)


def test_gaps_are_followed_for_each_number_of_rows() -> None:
    tuner = AheadTuner(COPY_MS)
    tuner.observe(1, gaps(0.137, 0.262), ACROSS)
    tuner.observe(2, gaps(0.01, 0.45), ACROSS)
    assert tuner.most(1) == (2, 2)
    assert tuner.most(2) == (0, 3)
    assert tuner.most(4) == (MAX_AHEAD, MAX_AHEAD)
    stalled = gaps(0.137, 0.262)
    stalled[2] = 50.0
    tuner.observe(1, stalled, ACROSS)  # one layer that waited for something moves no median
    assert tuner.most(1) == (2, 2)
    for _ in range(200):
        tuner.observe(1, gaps(0.3, 0.02), ACROSS)
    assert tuner.most(1) == (2, 0)


def test_a_clock_that_runs_backwards_is_no_gap() -> None:
    tuner = AheadTuner(COPY_MS)
    tuner.observe(1, gaps(-3.0, -1.0), ACROSS)
    assert tuner.most(1) == (0, 0)
