"""The split rule against a plain reading of its six sentences, pick by pick."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.offload.cost import cpu_count_table
from glm53srv.offload.split import HEAT_ONE, Lane, split_picks
from tests.offload.builders import COSTS


def plain_layer(
    picks: list[int],
    slots: NDArray[np.int32],
    heat: NDArray[np.int32],
    cpu_count: NDArray[np.int32],
    num_parts: int,
) -> list[Lane]:
    """One layer with sets and loops."""
    experts = {pick for pick in picks if pick >= 0}
    hits = {expert for expert in experts if slots[expert] >= 0}
    misses = sorted(experts - hits, key=lambda expert: (heat[expert], expert))
    whole, share = divmod(int(cpu_count[len(hits), len(misses)]), num_parts)
    on_cpu = set(misses[:whole])
    lane_of = {e: Lane.VRAM if e in hits else Lane.CPU if e in on_cpu else Lane.LINK for e in experts}
    if share:
        lane_of[misses[whole]] = Lane.SPLIT
    return [lane_of[pick] if pick >= 0 else Lane.NONE for pick in picks]


def random_case(
    rng: np.random.Generator, num_layers: int = 5, num_experts: int = 40
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    rows = int(rng.integers(1, 5))
    picks = rng.integers(0, num_experts, (num_layers, rows * 8)).astype(np.int32)
    picks[rng.random(picks.shape) < rng.choice([0.0, 0.3, 1.0])] = -1
    slots = rng.integers(0, 99, (num_layers, num_experts)).astype(np.int32)
    slots[rng.random(slots.shape) < rng.random()] = -1
    heat = rng.integers(0, rng.choice([2, HEAT_ONE, 2**31 - 1]), slots.shape).astype(np.int32)
    return picks, slots, heat


@pytest.mark.parametrize("seed", range(40))
def test_lanes_equal_the_plain_reading(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_split = 0
    for _ in range(20):
        num_parts = int(rng.choice([1, 5, 16]))
        picks, slots, heat = random_case(rng)
        width = picks.shape[1]
        drawn = rng.integers(0, num_parts * width + 1, (width + 1, width + 1), np.int32)
        misses = np.arange(width + 1, dtype=np.int32)[None, :]
        table = np.minimum(drawn, num_parts * misses)  # at most all misses
        split = split_picks(picks, slots, heat, table, num_parts=num_parts)
        num_split += int((split.share > 0).sum())
        for layer in range(len(picks)):
            wanted = plain_layer(picks[layer].tolist(), slots[layer], heat[layer], table, num_parts)
            assert split.lanes[layer].tolist() == [int(lane) for lane in wanted]
            assert (Lane.SPLIT in wanted) == (split.share[layer] > 0)
            load = split.num_hits[layer] + split.link_load[layer] + split.cpu_load[layer]
            assert load == pytest.approx(len({pick for pick in picks[layer].tolist() if pick >= 0}))
    assert num_split > 0


@pytest.mark.parametrize("seed", range(10))
def test_counts_and_standing_picks_describe_the_distinct_experts(seed: int) -> None:
    picks, slots, heat = random_case(np.random.default_rng(seed))
    split = split_picks(picks, slots, heat, cpu_count_table(COSTS, picks.shape[1], "fast"))
    for layer in range(len(picks)):
        experts = picks[layer][split.standing[layer]]
        assert sorted(experts) == sorted({int(p) for p in picks[layer] if p >= 0})
        lanes = split.lanes[layer][split.standing[layer]]
        found = [int((lanes == lane).sum()) for lane in (Lane.VRAM, Lane.LINK, Lane.CPU)]
        assert found == [split.num_hits[layer], split.num_link[layer], split.num_cpu[layer]]


def test_chosen_misses_take_no_longer_than_any_other_choice() -> None:
    rng = np.random.default_rng(3)
    picks, slots, heat = random_case(rng)
    split = split_picks(picks, slots, heat, cpu_count_table(COSTS, picks.shape[1], "fast"))
    for hits, link, cpu in zip(split.num_hits, split.num_link, split.num_cpu, strict=True):
        misses = int(link + cpu)
        best = min(COSTS.layer_ms(int(hits), misses - n, n) for n in range(misses + 1))
        assert COSTS.layer_ms(int(hits), int(link), int(cpu)) == pytest.approx(best)


def test_coldest_misses_go_to_the_cpu() -> None:
    picks = np.array([[0, 1, 2, 3]], np.int32)
    heat = np.array([[30, 10, 20, 10]], np.int32)
    slots = np.full((1, 4), -1, np.int32)
    two = np.full((5, 5), 2, np.int32)
    assert split_picks(picks, slots, heat, two).lanes.tolist() == [[Lane.LINK, Lane.CPU, Lane.LINK, Lane.CPU]]


def test_of_the_links_experts_the_coldest_is_shared() -> None:
    picks = np.array([[0, 1, 2, 3]], np.int32)
    heat = np.array([[30, 10, 20, 10]], np.int32)
    slots = np.full((1, 4), -1, np.int32)
    split = split_picks(picks, slots, heat, np.full((5, 5), 2 * 16 + 3, np.int32), num_parts=16)
    assert split.lanes.tolist() == [[Lane.LINK, Lane.CPU, Lane.SPLIT, Lane.CPU]]
    assert (split.num_link.tolist(), split.num_cpu.tolist(), split.share.tolist()) == ([2], [2], [3])
    assert (split.link_load.tolist(), split.cpu_load.tolist()) == ([2 - 3 / 16], [2 + 3 / 16])


def test_order_of_rows_does_not_change_an_experts_lane() -> None:
    rng = np.random.default_rng(9)
    picks, slots, heat = random_case(rng)
    table = cpu_count_table(COSTS, picks.shape[1], "fast")
    order = rng.permutation(picks.shape[1])
    straight, shuffled = (split_picks(p, slots, heat, table) for p in (picks, picks[:, order]))
    assert (straight.lanes[:, order] == shuffled.lanes).all()


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    slots = np.full((1, 4), -1, np.int32)
    with pytest.raises(IndexError):
        split_picks(np.array([[4]]), slots, slots, cpu_count_table(COSTS, 4, "fast"))
