"""Random walks of the whole offload core: decode, admissions, loans and staged prefill, bytes checked.

Every read of every step and prefill layer is compared with the expert's bytes; every operation is followed by
integrity checks. The long forms are marked slow.
"""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.offload.elastic import ElasticLoan, Phase
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.simulate.prefill import StagedPrefill
from glm53srv.offload.simulate.replay import OffloadReplay
from glm53srv.offload.vram_plan import VramPlan
from tests.offload.builders import SMALL, build_replay, random_picks

PLAN = VramPlan(num_slots=48, chunk_slots=4, elastic_slots=40, stage_slots=14, activation_slots=12, lines=())


class Walk:
    """One engine's worth of policy, device, loan and prefill, moved by random operations."""

    def __init__(self, seed: int, num_offers: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        params = ResidencyParams(
            touch_window_steps=int(self.rng.integers(0, 6)),
            victim_window=int(self.rng.integers(1, 9)),
            min_heat_gain=float(self.rng.choice([-2.0, 0.0, 0.02])),
            max_in_flight=int(self.rng.integers(1, 20)),
            num_offers=num_offers,
            offer_heat_gain=float(self.rng.choice([-2.0, 0.0, 0.01])),
        )
        copy_gb_s = float(self.rng.choice([0.05, 0.5, 5.0, 100.0]))
        self.loop: OffloadReplay = build_replay(PLAN.num_slots, params, copy_gb_s, num_rows=4)
        self.loan = ElasticLoan(PLAN)
        self.prefill: StagedPrefill | None = None
        self.num_reads = self.num_staged = self.num_kept = 0
        # A trace with a few phases, so that the working set moves.
        self._traces = [
            [random_picks(self.rng, rows) for _ in range(64)] for rows in (1, 2, 4) for _ in range(2)
        ]
        self._trace = 0

    def decode(self) -> None:
        if self.rng.random() < 0.02:
            self._trace = int(self.rng.integers(len(self._traces)))
        trace = self._traces[self._trace]
        picks = trace[int(self.rng.integers(len(trace)))]
        done = self.loop.step(picks, picks.shape[1] // SMALL.top_k)
        self.num_reads += int(done.split.num_hits.sum())
        self.num_kept += done.num_kept
        assert (self.loop.device.table == self.loop.policy.table()).all()

    def begin_prefill(self) -> None:
        if self.prefill is not None or self.loan.phase is Phase.CALLED:
            return
        needed = 2 * PLAN.stage_slots + int(self.rng.integers(0, PLAN.activation_slots + 1))
        shrink = self.loan.begin(needed).shrink
        # An engine reads the last log first; residency does not count on it.
        lend = self.loop.shrink if self.rng.random() < 0.5 else self.loop.policy.shrink
        lend(shrink)

    def move_prefill(self) -> None:
        """Start a chunk whose slots are lent, run a layer, abort, or end."""
        policy, device = self.loop.policy, self.loop.device
        if self.prefill is None:
            if self.loan.phase is not Phase.FULL and self.loan.poll(policy.is_lent):
                self.prefill = StagedPrefill(policy, device, PLAN)
            return
        if self.rng.random() < 0.03:
            self.prefill.abort()
        if self.prefill.schedule.is_done:
            self.prefill = None
            policy.grow(self.loan.end(is_more_waiting=bool(self.rng.random() < 0.3)).grow)
            return
        experts = np.flatnonzero(self.rng.random(SMALL.num_experts) < 0.8)
        layer = self.prefill.run_layer(experts, compute_ms=float(self.rng.uniform(0, 20)))
        self.num_staged += layer.num_staged

    def give_up(self) -> None:
        """Abort a loan that is still being called."""
        if self.loan.phase is Phase.CALLED:
            self.loop.policy.grow(self.loan.end(is_more_waiting=False).grow)

    def run(self, num_operations: int) -> None:
        operations = (self.decode, self.begin_prefill, self.move_prefill, self.give_up)
        chosen = self.rng.choice(len(operations), num_operations, p=(0.68, 0.06, 0.25, 0.01))
        for operation in chosen:
            operations[operation]()
            self.loop.policy.check_integrity()
            lent = self.loop.policy.num_slots - self.loop.policy.capacity
            assert lent == self.loan.num_lent


@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_reads_only_right_experts(seed: int) -> None:
    walk = Walk(seed)
    walk.run(1500)
    assert walk.num_reads > 500  # the walk did exercise slots and staging
    assert walk.num_staged > 50


@pytest.mark.parametrize("num_offers", [1, 3, 24])
@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_with_offers_reads_only_right_experts(seed: int, num_offers: int) -> None:
    walk = Walk(seed, num_offers)
    walk.run(1200)
    assert walk.num_reads > 300
    assert walk.num_staged > 50
    assert walk.num_kept > 10  # steps did take what was offered


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_long_random_walk_reads_only_right_experts(seed: int) -> None:
    walk = Walk(seed)
    walk.run(100_000)
    assert walk.num_staged > 1000
