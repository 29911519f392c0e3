"""Slots offered to experts of the link: the rule against a plain reading, the host's list, and the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.offload.offers import (
    ABSENT,
    BARRED,
    RING_SLOTS,
    OfferBook,
    Offers,
    keep_picks,
    wrapped,
)
from glm53srv.offload.residency import ResidencyPolicy, SlotState
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.simulate.device import WrongExpertRead
from glm53srv.offload.simulate.replay import OffloadReplay
from glm53srv.offload.split import Lane, split_picks
from glm53srv.offload.warm_fill import fill_from_history
from tests.offload.builders import SMALL, build_replay, random_picks

NOTHING = np.empty(0, np.int32)
OFFERING = ResidencyParams(num_offers=1, offer_heat_gain=0.0)


def plain_keeping(
    picks: NDArray[np.int32],
    lanes: NDArray[np.int8],
    entries: NDArray[np.int32],
    heat: NDArray[np.int32],
    offers: Offers,
    head: int,
    num_landing: int,
) -> tuple[list[list[int]], int]:
    """The rule pick by pick, with numbers that do not wrap around."""
    first, tail = head + wrapped(offers.first - head), head + wrapped(offers.tail - head)
    kept = []
    for layer, row in enumerate(picks.tolist()):
        head = max(head, first)
        seen: set[int] = set()
        kept.append([-1] * len(row))
        for place, expert in enumerate(row):
            if expert in seen or lanes[layer, place] not in (Lane.LINK, Lane.SPLIT):
                continue
            seen.add(expert)  # that is copied; one that is shared is not whole
            is_hot = heat[layer, expert] >= offers.threshold and lanes[layer, place] == Lane.LINK
            if len(seen) <= num_landing and entries[layer, expert] == ABSENT and is_hot and head < tail:
                kept[-1][place] = int(offers.ring[head % RING_SLOTS])
                head += 1
    return kept, head


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_equals_the_plain_reading(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_kept = 0
    for _ in range(30):
        picks = rng.integers(-1, 30, (5, 16)).astype(np.int32)
        entries = rng.integers(0, 50, (5, 30)).astype(np.int32)
        entries[rng.random(entries.shape) < 0.7] = ABSENT
        entries[rng.random(entries.shape) < 0.2] = BARRED
        heat = rng.integers(0, 100, entries.shape).astype(np.int32)
        num_parts = int(rng.choice([1, 4]))
        most = num_parts * np.arange(17)[None]
        count = np.minimum(most, rng.integers(0, 6 * num_parts)) * np.ones((17, 1), np.int32)
        split = split_picks(picks, entries, heat, count.astype(np.int32), num_parts=num_parts)
        head = int(rng.integers(2**31 - 20, 2**31 + 20))
        first = head + int(rng.integers(-20, 10))
        tail = max(first, head) + int(rng.integers(0, 30))
        ring = rng.permutation(RING_SLOTS).astype(np.int32)
        offers = Offers(int(rng.integers(0, 60)), wrapped(first), wrapped(tail), ring)
        num_landing = int(rng.choice([0, 3, 16]))
        found = keep_picks(picks, split, entries, heat, offers, wrapped(head), num_landing)
        slots, last = plain_keeping(picks, split.lanes, entries, heat, offers, head, num_landing)
        assert found.slots.tolist() == slots
        assert found.head == wrapped(last)
        # Layer by layer, as a device does it, is the same.
        number = wrapped(head)
        for layer in range(5):
            one = slice(layer, layer + 1)
            alone = split_picks(
                picks[one], entries[one], heat[one], count.astype(np.int32), num_parts=num_parts
            )
            step = keep_picks(picks[one], alone, entries[one], heat[one], offers, number, num_landing)
            assert step.slots[0].tolist() == slots[layer]
            number = step.head
        num_kept += int((found.slots >= 0).sum())
    assert num_kept > 50


def test_offers_are_taken_in_order_and_withdrawn_together() -> None:
    book = OfferBook()
    book.add(np.array([5, 3, 9], np.int32))
    book.take(np.array([5], np.int32))
    with pytest.raises(ValueError, match="offered next"):
        book.take(np.array([9], np.int32))
    again = OfferBook()
    again.add(np.array([5, 3], np.int32))
    assert again.withdraw().tolist() == [5, 3]
    again.add(np.array([7], np.int32))
    offers = again.published(0)
    assert (offers.first, offers.tail, int(offers.ring[2])) == (2, 3, 7)
    with pytest.raises(ValueError, match="the ring holds"):
        again.add(np.arange(RING_SLOTS, dtype=np.int32))


def picks_of(*experts: int) -> NDArray[np.int32]:
    picks = np.full((SMALL.num_layers, SMALL.top_k), -1, np.int32)
    picks[0, : len(experts)] = experts
    return picks


def kept_in(slot: int) -> NDArray[np.int32]:
    kept = np.full((SMALL.num_layers, SMALL.top_k), -1, np.int32)
    kept[0, 0] = slot
    return kept


def offering() -> tuple[ResidencyPolicy, ResidencyUpdate]:
    """A full pool of 16 with experts 0.. of layer 0, the coldest one's slot offered; and its last update."""
    policy = ResidencyPolicy(SMALL, 16, OFFERING)
    history = np.zeros(SMALL.num_keys, np.float32)
    history[:16] = np.linspace(0.2, 0.5, 16)
    fill_from_history(policy, history, lambda update: update.copy_slots)
    update = policy.advance(NOTHING, 0)
    policy.check_integrity()
    return policy, update


def offered(policy: ResidencyPolicy) -> int:
    return int(np.flatnonzero(policy.slot_states() == SlotState.OFFERED)[0])


def test_the_coldest_is_unmapped_and_offered_and_who_takes_it_is_mapped() -> None:
    policy, update = offering()
    slot = offered(policy)
    assert update.offers is not None
    assert policy.table()[0, 0] == -1  # the coldest of all
    policy.observe(picks_of(20), kept_in(slot))
    after = policy.advance(NOTHING, 0)
    policy.check_integrity()
    assert (after.map_keys.tolist(), after.map_slots.tolist()) == ([20], [slot])
    assert policy.table()[0, 20] == slot
    assert len(after.unmap_keys) == 1  # the next victim, for the next offer
    assert after.offered_slots.tolist() == [offered(policy)]
    assert offered(policy) != slot


def test_the_threshold_is_the_heat_of_the_coldest_that_stays_and_the_gain() -> None:
    policy, update = offering()
    coldest = min(policy.heat[key] for key in range(16) if policy.table()[0, key] >= 0)
    assert update.offers is not None
    assert update.offers.threshold == int(float(coldest) * 2**20)
    warm = ResidencyPolicy(SMALL, 16, replace(OFFERING, offer_heat_gain=0.1))
    warm.warm_start(policy.heat)
    landed = NOTHING
    for _ in range(4):
        update = warm.advance(landed, 64)
        landed = update.copy_slots
    assert update.offers is not None
    assert update.offers.threshold == pytest.approx((float(coldest) + 0.1) * 2**20, abs=2)


def test_slots_that_were_not_offered_and_experts_that_have_one_are_refused() -> None:
    policy, _ = offering()
    with pytest.raises(ValueError, match="cannot have taken"):
        policy.observe(picks_of(20), kept_in(int(policy.table()[0, 15])))
    policy, _ = offering()
    with pytest.raises(ValueError, match="cannot have taken"):
        policy.observe(picks_of(15), kept_in(offered(policy)))


def test_a_copy_does_not_start_for_an_expert_that_the_running_step_keeps() -> None:
    policy = ResidencyPolicy(SMALL, 16, OFFERING)
    policy.advance(NOTHING, 0)
    slot = offered(policy)
    policy.observe(picks_of(20))
    barring = policy.advance(NOTHING, 8)  # beside a step that keeps 20 in the offered slot
    assert barring.bar_keys.tolist() == [20]
    assert not len(barring.copy_keys)
    entries = np.full(SMALL.num_keys, ABSENT, np.int32)
    entries[20] = slot
    barring.change(entries)
    assert entries[20] == slot  # behind that step there is nothing to bar
    policy.observe(picks_of(20), kept_in(slot))
    after = policy.advance(NOTHING, 8)
    policy.check_integrity()
    assert not len(after.copy_keys)
    assert policy.table()[0, 20] == slot


def test_a_copy_starts_one_advance_after_its_key_was_barred() -> None:
    policy = ResidencyPolicy(SMALL, 16, OFFERING)
    policy.observe(picks_of(20))
    entries = np.full(SMALL.num_keys, ABSENT, np.int32)
    policy.advance(NOTHING, 8).change(entries)
    assert entries[20] == BARRED
    copying = policy.advance(NOTHING, 8)
    assert copying.copy_keys.tolist() == [20]
    policy.shrink(16)  # called back: the key may be kept again
    policy.advance(NOTHING, 0).change(entries)
    assert entries[20] == ABSENT


def test_a_slot_called_back_is_lent_only_when_no_step_can_take_or_read_it() -> None:
    policy, _ = offering()
    slot = offered(policy)
    policy.shrink(16)
    policy.observe(picks_of(1))
    first = policy.advance(NOTHING, 0)  # beside a step that takes the slot: it began before the withdrawal
    assert first.offers is not None
    assert first.offers.first == first.offers.tail  # nothing is left for the next step
    policy.observe(picks_of(20), kept_in(slot))
    second = policy.advance(NOTHING, 0)  # beside a step that reads the slot
    assert second.unmap_keys.tolist() == [20]
    assert not len(second.map_keys)
    lent = [policy.is_lent]
    policy.observe(picks_of(20))
    policy.advance(NOTHING, 0)
    lent.append(policy.is_lent)
    assert lent == [False, True]
    policy.check_integrity()


class CopiesAtOnce(ResidencyPolicy):
    """Bars nothing: a copy may be on its way to what a step keeps."""

    def advance(self, landed_slots: NDArray[np.integer], max_admissions: int) -> ResidencyUpdate:
        update = super().advance(landed_slots, max_admissions)
        return replace(update, bar_keys=NOTHING)


class OffersMapped(ResidencyPolicy):
    """Offers slots and leaves the table as it is."""

    def advance(self, landed_slots: NDArray[np.integer], max_admissions: int) -> ResidencyUpdate:
        return replace(super().advance(landed_slots, max_admissions), unmap_keys=NOTHING)


def drive(kind: type[ResidencyPolicy], num_steps: int = 150) -> int:
    """Run a policy on a device that checks; gives how many experts were kept."""
    loop = build_replay(48, copy_gb_s=0.3, num_rows=2)
    policy = kind(SMALL, 48, replace(OFFERING, num_offers=3, offer_heat_gain=-2.0))
    loop = OffloadReplay(policy, loop.device, loop.budget, loop.cpu_count)
    rng = np.random.default_rng(0)
    return sum(loop.step(random_picks(rng, 2), 2).num_kept for _ in range(num_steps))


def test_the_real_policy_keeps_experts_and_passes_the_checks() -> None:
    assert drive(ResidencyPolicy) > 10


def test_a_copy_beside_a_kept_expert_is_caught() -> None:
    with pytest.raises(ValueError, match="cannot have taken"):
        drive(CopiesAtOnce)


def test_offering_what_is_mapped_is_caught() -> None:
    with pytest.raises(WrongExpertRead):
        drive(OffersMapped)
