"""Our engine as a peer, over an offload that needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch, as make test-triton installs it")

from bench.peers.ours import OurPeer
from glm53srv.offload.calibrate import assume
from glm53srv.offload.cost import CostOverrides, default_costs
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.vram_plan import plan_vram
from tests.engine.cuda.fakes import FakeModel, FakeOffload, make_engine

GEOMETRY = ExpertGeometry(num_layers=3, num_experts=288, top_k=4, expert_bytes=9_437_184)
SHARE = 93


class Offload(FakeOffload):
    """One with a policy and a plan, as bench.peers asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_vram(GEOMETRY, 8 * 2**30, "exact")
        self.policy = ResidencyPolicy(GEOMETRY, self.plan.num_slots)
        self.counts = Counts(num_vram=5)
        self.calibration = assume(default_costs(1), CostOverrides())
        self.lane = None
        self.store = SimpleNamespace(table=self.policy.table(), verify=lambda keys: [])


def make_peer() -> tuple[OurPeer, Offload]:
    offload = Offload()
    config: Any = SimpleNamespace(num_layers=6)
    return OurPeer(make_engine(FakeModel(), offload), config, None, SHARE), offload


def test_decode_is_held_to_the_share() -> None:
    peer, offload = make_peer()
    whole = offload.policy.capacity
    assert whole > SHARE
    with peer.holding():
        assert offload.policy.capacity == SHARE
    assert offload.policy.capacity == whole
    peer.close()


def test_it_tells_its_set_up_and_its_counters() -> None:
    peer, offload = make_peer()
    facts = peer.facts()
    assert (facts["layers"], facts["decode_slots"], facts["slots"]) == (6, SHARE, offload.plan.num_slots)
    assert facts["peak_ram_gib"] > 0
    assert "crew" not in facts
    assert peer.counts()["num_vram"] == 5
    peer.close()
    assert offload.calls == ["close"]
