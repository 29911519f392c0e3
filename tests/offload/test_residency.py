"""What the residency policy promises, one promise per test."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.offload.copy_budget import CopyBudget, CopyBudgetParams
from glm53srv.offload.residency import ResidencyPolicy, SlotState
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.residency_update import ResidencyUpdate
from tests.offload.builders import SMALL, random_picks

NOTHING = np.empty(0, np.int32)
UNGUARDED = ResidencyParams(touch_window_steps=2, min_heat_gain=-2.0)


def picks_of(*experts: int) -> NDArray[np.int32]:
    """The same picks in layer 0, none elsewhere."""
    picks = np.full((SMALL.num_layers, SMALL.top_k), -1, np.int32)
    picks[0, : len(experts)] = experts
    return picks


def settle(policy: ResidencyPolicy, landed: NDArray[np.int32] = NOTHING) -> None:
    """Let every copy land and every drained slot come to rest, admitting nothing more."""
    for _ in range(4):
        landed = policy.advance(landed, 0).copy_slots


def filled(num_slots: int = 4, params: ResidencyParams = UNGUARDED) -> ResidencyPolicy:
    """A pool whose slots hold experts 0 .. num_slots - 1 of layer 0."""
    policy = ResidencyPolicy(SMALL, num_slots, params)
    heat = np.zeros(SMALL.num_keys, np.float32)
    heat[:num_slots] = 0.5
    policy.warm_start(heat)
    landed = NOTHING
    while not (policy.table()[0, :num_slots] >= 0).all():
        landed = policy.advance(landed, num_slots).copy_slots
    settle(policy)
    assert (policy.table()[0, :num_slots] >= 0).all()
    return policy


def admit(policy: ResidencyPolicy, expert: int, room: int = 8) -> ResidencyUpdate:
    """Pick an expert twice; return the update that makes room for it."""
    policy.observe(picks_of(expert))
    assert not len(policy.advance(NOTHING, room).unmap_keys)
    policy.observe(picks_of(expert))
    return policy.advance(NOTHING, room)


def test_first_touch_is_not_admitted_and_second_is() -> None:
    update = admit(filled(), expert=9)
    assert len(update.unmap_keys) == 1


@pytest.mark.parametrize(("num_between", "is_admitted"), [(0, True), (1, True), (2, False), (9, False)])
def test_only_touches_within_the_window_count(num_between: int, is_admitted: bool) -> None:
    policy = filled()
    policy.observe(picks_of(9))
    for _ in range(num_between):
        policy.observe(picks_of(0))
    policy.observe(picks_of(9))
    assert bool(len(policy.advance(NOTHING, 8).unmap_keys)) == is_admitted


def test_window_zero_admits_at_first_touch() -> None:
    policy = filled(params=ResidencyParams(touch_window_steps=0, min_heat_gain=-2.0))
    policy.observe(picks_of(9))
    assert len(policy.advance(NOTHING, 8).unmap_keys) == 1


def test_free_slots_take_first_touches() -> None:
    policy = ResidencyPolicy(SMALL, 4, UNGUARDED)
    policy.observe(picks_of(3, 7))
    assert sorted(policy.advance(NOTHING, 8).copy_keys.tolist()) == [3, 7]


def test_a_slot_is_unmapped_one_advance_before_its_copy_and_mapped_after_it_landed() -> None:
    policy = filled()
    unmapping = admit(policy, expert=9)
    victim = int(unmapping.unmap_keys[0])
    assert not len(unmapping.copy_keys)
    assert policy.table()[0, victim] == -1

    copying = policy.advance(NOTHING, 8)
    assert copying.copy_keys.tolist() == [9]
    assert policy.table()[0, 9] == -1
    waiting = policy.advance(NOTHING, 8)
    assert not len(waiting.map_keys)

    mapping = policy.advance(copying.copy_slots, 8)
    assert mapping.map_keys.tolist() == [9]
    assert mapping.map_slots.tolist() == copying.copy_slots.tolist()
    assert policy.table()[0, 9] == copying.copy_slots[0]


def test_reference_bits_protect_what_was_just_picked() -> None:
    policy = filled(params=ResidencyParams(touch_window_steps=2, min_heat_gain=-2.0, victim_window=1))
    policy.observe(picks_of(0, 1, 2, 3))
    policy.advance(NOTHING, 0)
    admit(policy, expert=9)  # the hand turns once, clearing all bits
    settle(policy, policy.advance(NOTHING, 0).copy_slots)
    survivors = np.flatnonzero(policy.table()[0, :4] >= 0)
    policy.observe(picks_of(int(survivors[0]), int(survivors[1])))
    update = admit(policy, expert=11)
    assert update.unmap_keys.tolist() == [int(survivors[2])]


def test_the_hand_spares_referenced_slots_once_and_new_ones_too() -> None:
    policy = filled(4, ResidencyParams(touch_window_steps=2, min_heat_gain=-2.0, victim_window=1))

    def replaced_by(expert: int) -> int:
        victim = int(admit(policy, expert).unmap_keys[0])
        settle(policy, policy.advance(NOTHING, 0).copy_slots)
        return victim

    assert replaced_by(9) == 0  # all are fresh, so all bits are cleared; the hand stops behind slot 0
    policy.observe(picks_of(1))
    assert replaced_by(10) == 2  # slot 1 is spared and its bit cleared; the hand stops behind slot 2
    policy.observe(picks_of(3))
    assert replaced_by(11) == 1  # slot 3 was picked, slot 0 is fresh, slot 1 was spared already


def test_the_coldest_of_the_offered_slots_goes() -> None:
    policy = filled(params=ResidencyParams(touch_window_steps=2, min_heat_gain=-2.0, victim_window=4))
    policy.heat[:4] = [0.4, 0.3, 0.1, 0.2]
    policy.observe(picks_of(0, 1, 2, 3))  # all referenced: the next sweep clears and offers all
    assert admit(policy, expert=9).unmap_keys.tolist() == [2]


def test_a_guarded_pool_keeps_what_is_hotter() -> None:
    policy = filled(params=ResidencyParams(touch_window_steps=2, min_heat_gain=0.02))
    assert not len(admit(policy, expert=9).unmap_keys)
    policy.heat[:4] = 0.0
    assert len(admit(policy, expert=10).unmap_keys) == 1


def test_admissions_respect_the_budget_and_prefer_the_hottest() -> None:
    policy = filled()
    policy.heat[[9, 10, 11]] = [0.1, 0.3, 0.2]
    for _ in range(2):
        policy.observe(picks_of(9, 10, 11))
        policy.advance(NOTHING, 2)
    assert sorted(policy.advance(NOTHING, 0).copy_keys.tolist()) == [10, 11]


def test_copies_in_flight_are_bounded_and_never_victims() -> None:
    params = ResidencyParams(touch_window_steps=0, min_heat_gain=-2.0, max_in_flight=3)
    policy = filled(8, params)
    rng = np.random.default_rng(0)
    for _ in range(50):
        policy.observe(random_picks(rng))
        update = policy.advance(NOTHING, 100)  # nothing ever lands
        assert policy.num_in_flight <= 3
        policy.check_integrity()
        assert not len(update.map_keys)
    assert (policy.slot_states() == SlotState.COPYING).sum() == 3
    assert (policy.slot_states() == SlotState.RESIDENT).sum() == 5


def test_a_slot_that_was_not_being_copied_cannot_land() -> None:
    with pytest.raises(ValueError):
        filled().advance(np.array([0]), 0)


def test_an_unknown_expert_in_the_log_is_an_error() -> None:
    with pytest.raises(IndexError):
        filled().observe(picks_of(SMALL.num_experts))


def test_an_expert_that_just_landed_is_not_unmapped_in_the_same_update() -> None:
    policy = filled(1)
    admit(policy, expert=9)
    copying = policy.advance(NOTHING, 0)
    policy.observe(picks_of(10))
    policy.observe(picks_of(10))
    update = policy.advance(copying.copy_slots, 8)
    assert update.map_keys.tolist() == [9]
    assert not len(update.unmap_keys)


def test_shrink_lends_only_after_the_running_step_and_the_copies() -> None:
    policy = filled()
    admit(policy, expert=9)
    copying = policy.advance(NOTHING, 0)
    assert policy.is_lent  # nothing is lent, so nothing can be touched
    policy.shrink(4)
    steps = [policy.is_lent]
    unmapping = policy.advance(NOTHING, 0)
    assert len(unmapping.unmap_keys) == 3
    steps.append(policy.is_lent)  # the running step may still read
    policy.advance(NOTHING, 0)
    steps.append(policy.is_lent)  # one copy is still under way
    landing = policy.advance(copying.copy_slots, 0)
    assert not len(landing.map_keys)
    assert steps == [False, False, False]
    assert policy.is_lent
    assert (policy.table() == -1).all()


def test_grow_brings_the_same_experts_back_hottest_first() -> None:
    policy = filled(8)
    policy.heat[:8] = [0.5, 0.1, 0.8, 0.3, 0.7, 0.2, 0.6, 0.4]
    held = set(np.flatnonzero(policy.table().ravel() >= 0).tolist())
    policy.shrink(8)
    settle(policy)
    policy.grow(8)
    first = policy.advance(NOTHING, 3)
    assert first.copy_keys.tolist() == [2, 4, 6]
    rest = policy.advance(first.copy_slots, 8)
    settle(policy, rest.copy_slots)
    assert set(np.flatnonzero(policy.table().ravel() >= 0).tolist()) == held


def test_decode_goes_on_in_what_is_left_while_slots_are_lent() -> None:
    policy = filled(8)
    policy.shrink(4)
    settle(policy)
    update = admit(policy, expert=9)
    assert len(update.unmap_keys) == 1
    settle(policy, policy.advance(NOTHING, 0).copy_slots)
    assert policy.table()[0, 9] in range(4)
    assert policy.is_lent


@pytest.mark.parametrize("count", [-1, 5])
def test_impossible_loans_are_refused(count: int) -> None:
    policy = filled()
    with pytest.raises(ValueError):
        policy.shrink(count)
    with pytest.raises(ValueError):
        policy.grow(1)


def test_heat_changes_only_by_observed_steps() -> None:
    policy = filled()
    before = policy.heat.copy()
    policy.shrink(2)  # what a prefill does to the pool
    settle(policy)
    policy.grow(2)
    settle(policy)
    assert (policy.heat == before).all()
    policy.observe(picks_of(5))
    assert policy.heat[5] > 0 == before[5]


def test_heat_of_a_constant_pick_tends_to_one() -> None:
    policy = filled()
    for _ in range(1000):
        policy.observe(picks_of(5))
    assert policy.heat[5] == pytest.approx(1.0, abs=1e-3)
    assert policy.heat_table()[0, 5] == pytest.approx(2**20, rel=1e-3)
    assert policy.heat_table().dtype == np.int32


def test_history_is_the_mean_over_a_short_run_and_outlives_heat() -> None:
    fresh = ResidencyPolicy(SMALL, 4)
    for t in range(400):
        fresh.observe(picks_of(5) if t < 100 else picks_of(6))
    assert fresh.history[5] == pytest.approx(0.25, rel=1e-3)
    assert fresh.history[6] == pytest.approx(0.75, rel=1e-3)
    assert fresh.heat[5] < 0.02


def test_a_warm_history_moves_slowly() -> None:
    policy = ResidencyPolicy(SMALL, 4)
    policy.warm_start(np.full(SMALL.num_keys, 0.5, np.float32))
    policy.observe(picks_of(5))
    assert policy.history[5] == pytest.approx(0.5 + 0.5 / 4000, rel=1e-6)
    assert policy.history[6] == pytest.approx(0.5 - 0.5 / 4000, rel=1e-6)


def test_an_update_counts_the_admissions_it_decides() -> None:
    policy = filled()
    assert admit(policy, expert=9).num_admitted == 1  # its copy starts with the next update
    assert policy.advance(NOTHING, 8).num_admitted == 0
    empty = ResidencyPolicy(SMALL, 4, UNGUARDED)
    empty.observe(picks_of(3, 7))
    assert empty.advance(NOTHING, 8).num_admitted == 2


def test_a_budget_saves_up_to_its_burst_and_no_further() -> None:
    budget = CopyBudget(CopyBudgetParams(link_share=0.25, copy_ms=0.5, max_burst=10))
    assert budget.grant(3.0) == 1
    assert budget.grant(1.0) == 2
    budget.spend(2)
    assert budget.grant(0.0) == 0
    assert budget.grant(1e6) == 10
    with pytest.raises(ValueError):
        budget.spend(11)


@pytest.mark.parametrize(
    "bad",
    [
        {"touch_window_steps": -1},
        {"heat_keep": 1.0},
        {"heat_keep": 0.0},
        {"victim_window": 0},
        {"max_in_flight": 0},
    ],
)
def test_impossible_parameters_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        ResidencyParams(**bad)
