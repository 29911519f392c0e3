"""Jobs of whole steps: numbered on the host, posted by kernels that read the number where they were told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import CrewOptions
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.cpu_lane import HAND_OVER_MS, MAX_HAND_OVER_MS, CpuLane, HandOver
from glm53srv.offload.device.gpu.launch import COUNT_WORDS, MailRing, PlanInputs, PlanOutputs, make_landing
from glm53srv.offload.device.gpu.plan_kernel import launch_plan
from glm53srv.offload.offers import NUM_WORDS
from tests.offload_device.gpu.fake_cuda import FakeDriver

NUM_STEPS = 3


def make_lane(arena: ExpertArena, first_seq: int) -> CpuLane:
    options = CrewOptions(1, limit=10.0, deadline_ms=60_000)
    return CpuLane(arena, 1, options, FakeDriver(), torch.device("cpu"), first_seq=first_seq)


def run_layer(arena: ExpertArena, layer: int, ring: MailRing, rng: np.random.Generator) -> None:
    """Post one row's picks, all of them for the CPU, and wait for their sum."""
    geometry, hidden = arena.geometry, arena.layout.hidden
    experts, top_k = geometry.num_experts, geometry.top_k
    inputs = PlanInputs(
        picks=torch.from_numpy(rng.permutation(experts)[None, :top_k].astype(np.int64)),
        weights=torch.full((1, top_k), 0.25, dtype=torch.half),
        x=torch.from_numpy(rng.normal(size=(1, hidden))).half(),
        slots=torch.full((experts,), -1, dtype=torch.int32),
        heat=torch.zeros(experts, dtype=torch.int32),
        cpu_count=torch.arange(top_k + 1, dtype=torch.int32).repeat(top_k + 1, 1),  # every miss
        own_scales=torch.zeros(experts, dtype=torch.int64),
        slot_addresses=torch.zeros(1, dtype=torch.int64),
        offers=torch.zeros(NUM_WORDS, dtype=torch.int32),
        offer_head=torch.zeros(1, dtype=torch.int32),
        home=arena.address(layer, 0),
        layer=layer,
        record_bytes=arena.layout.record_bytes,
        up_offset=arena.layout.offsets[1],
        down_offset=arena.layout.offsets[2],
        num_parts=1,
        part_blocks=arena.layout.num_blocks,
    )
    gate, up, down, scales = (torch.zeros(experts, dtype=torch.int64) for _ in range(4))
    log, lanes = torch.zeros(top_k, dtype=torch.int32), torch.zeros(top_k, dtype=torch.int8)
    counts = torch.zeros(COUNT_WORDS, dtype=torch.int32)
    landing = make_landing(torch.zeros((0, arena.layout.record_bytes), dtype=torch.uint8))
    outputs = PlanOutputs(gate, up, down, scales, log, lanes, torch.zeros_like(log), counts)
    launch_plan(inputs, outputs, landing, ring)
    out = torch.zeros(1, hidden)
    launch_combine(out, counts, layer, ring)  # waits for the job of this number
    assert counts.tolist() == [0, 0, top_k, 0, 0, 0, 0, 0]
    assert bool(out.any())


@pytest.mark.parametrize("first_seq", [1, 2**32 - 7, 2**31 - 7])
def test_each_steps_jobs_have_the_next_numbers_wherever_they_wrap(arena: ExpertArena, first_seq: int) -> None:
    layers, rng = arena.geometry.num_layers, np.random.default_rng(first_seq)
    lane, place = make_lane(arena, first_seq), torch.zeros(1, dtype=torch.int32)
    usual = lane.ring
    with lane.numbered_at(place):
        captured = lane.ring
    assert lane.ring is usual
    try:
        for step in range(NUM_STEPS):
            # a step that is a graph, then one that is not
            ring, target = (captured, place) if step % 2 == 0 else (lane.ring, lane.ring.first_seq)
            target.fill_(lane.begin_step())
            number = int(target.numpy().view(np.uint32)[0])
            assert number == (first_seq + step * layers) % 2**32
            answers = lane.take_answers()
            assert len(answers) == (layers if step else 0)
            assert (answers[:, 0] == arena.geometry.top_k).all()
            assert (answers[:, 1] > 0).all()
            assert len(lane.take_answers()) == 0, "each is given once"
            for layer in range(layers):
                run_layer(arena, layer, ring, rng)
            lane.check()
        assert lane.stats().num_jobs == NUM_STEPS * layers
    finally:
        lane.close()


def test_the_hand_over_is_what_a_jobs_time_has_beside_its_computing() -> None:
    hand_over, rng = HandOver(), np.random.default_rng(0)
    for _ in range(100):
        computed_ms = rng.uniform(0.1, 0.5, 42)
        whole_ms = computed_ms + 0.05 + rng.normal(0, 0.005, 42)
        whole_ms[rng.random(42) < 0.5] = np.nan  # not waited for
        whole_ms[3] = 80.0  # a stall
        hand_over.observe(whole_ms, computed_ms)
    assert hand_over.value_ms == pytest.approx(0.05, abs=0.003)


def test_without_waits_the_hand_over_stays_and_stalls_are_bounded() -> None:
    hand_over = HandOver()
    hand_over.observe(np.full(42, np.nan), np.full(42, 0.3))
    hand_over.observe(np.zeros(0), np.zeros(0))
    assert hand_over.value_ms == HAND_OVER_MS
    for _ in range(200):
        hand_over.observe(np.full(42, 80.0), np.full(42, 0.3))
    assert hand_over.value_ms == pytest.approx(MAX_HAND_OVER_MS)
    for _ in range(200):
        hand_over.observe(np.full(42, 0.1), np.full(42, 0.3))  # two clocks may disagree
    assert hand_over.value_ms == pytest.approx(0.0, abs=1e-6)
