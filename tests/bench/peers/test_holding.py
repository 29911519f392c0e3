"""Decode is held to a share of the cache, and the cache is whole again behind it."""

from __future__ import annotations

import numpy as np
import pytest

from bench.peers.holding import holding_slots
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency import ResidencyPolicy, SlotState

GEOMETRY = ExpertGeometry(num_layers=3, num_experts=32, top_k=4, expert_bytes=1000)
NUM_SLOTS, SHARE = 48, 12


class Decode:
    """A policy driven as decode steps drive it; copies land one step later."""

    def __init__(self) -> None:
        self.policy = ResidencyPolicy(GEOMETRY, NUM_SLOTS)
        self._rng = np.random.default_rng(3)
        self._landing = np.empty(0, np.int32)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            picks = np.stack([self._rng.choice(GEOMETRY.num_experts, 4, replace=False) for _ in range(3)])
            self.policy.observe(picks)
            self._landing = self.policy.advance(self._landing, 8).copy_slots
            self.policy.check_integrity()

    def num_resident(self) -> int:
        return int((self.policy.table() >= 0).sum())


def test_decode_has_its_share_and_the_prompts_have_all() -> None:
    decode = Decode()
    decode.run(30)
    assert decode.num_resident() > SHARE

    with holding_slots(decode.policy, SHARE):
        decode.run(10)
        assert 0 < decode.num_resident() <= SHARE
        assert decode.policy.is_lent

    assert decode.policy.capacity == NUM_SLOTS
    assert not (decode.policy.slot_states() == SlotState.LENT).any()
    decode.run(30)
    assert decode.num_resident() > SHARE


def test_a_cache_smaller_than_the_share_is_left_as_it_is() -> None:
    decode = Decode()
    with holding_slots(decode.policy, NUM_SLOTS + 1):
        assert decode.policy.capacity == NUM_SLOTS
    assert decode.policy.capacity == NUM_SLOTS


def test_the_slots_come_back_behind_an_error() -> None:
    decode = Decode()
    with pytest.raises(IndexError), holding_slots(decode.policy, SHARE):
        decode.policy.observe(np.array([[GEOMETRY.num_experts]]))
    assert decode.policy.capacity == NUM_SLOTS
