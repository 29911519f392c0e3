"""The CPU's part of a short prompt: picks and weights changed in place, sums added, nothing lost or twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from glm53srv.kernels import Clamp, KernelPool
from glm53srv.offload.cost import CostModel
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.gpu.prefill_lane import PrefillLane
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape

HIDDEN, TOP_K, LIMIT = 256, 4, 10.0
COSTS = CostModel(0.1, 0.2, 0.8, 0.004)


@pytest.fixture
def lane() -> PrefillLane:
    return PrefillLane(64, HIDDEN, TOP_K, torch.device("cpu"))


@pytest.fixture
def crew(arena: ExpertArena) -> Iterator[Crew]:
    with Crew(arena, Mailbox(MailboxShape(1, TOP_K, HIDDEN)), CrewOptions(1, limit=LIMIT)) as made:
        yield made


@pytest.mark.parametrize("rows", [2, 9, 40])
def test_gpu_and_cpu_make_the_whole_layer(
    arena: ExpertArena, crew: Crew, lane: PrefillLane, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    experts, layer = arena.geometry.num_experts, 1
    chosen = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(rows)]).astype(np.int64)
    factors = rng.uniform(0.05, 1.0, chosen.shape).astype(np.float16)
    x = rng.normal(size=(rows, HIDDEN)).astype(np.float16)
    table = np.where(rng.random(experts) < 0.3, 5, -1).astype(np.int32)
    picks, weights = torch.from_numpy(chosen.copy()), torch.from_numpy(factors.copy())
    lane.take(crew, layer, torch.from_numpy(x), picks, weights, table, COSTS)
    changed = weights.numpy() == 0
    assert changed.any()
    assert not changed[table[chosen] >= 0].any()  # what is in VRAM stays there
    wide, every = x.astype(np.float32), arena.table(layer)
    with KernelPool(1) as pool:
        kept = np.where(changed, -1, picks.numpy()).astype(np.int32)
        gpu = pool.experts(wide, every, kept, weights.numpy().astype(np.float32), LIMIT, Clamp.ACTIVATION)
        whole = pool.experts(
            wide, every, chosen.astype(np.int32), factors.astype(np.float32), LIMIT, Clamp.ACTIVATION
        )
    out = torch.from_numpy(gpu.copy())
    lane.add(out)
    error = np.linalg.norm(out.numpy() - whole) / np.linalg.norm(whole)
    assert error < 2e-3  # the workers' products have 16-bit activations
    assert np.linalg.norm(gpu - whole) / np.linalg.norm(whole) > 0.05  # there was something to add
    assert lane.work.num_experts == len(np.unique(chosen[changed]))


def test_a_layer_whose_experts_are_all_in_vram_is_left_alone(
    arena: ExpertArena, crew: Crew, lane: PrefillLane
) -> None:
    experts = arena.geometry.num_experts
    picks = torch.arange(TOP_K)[None].repeat(3, 1)
    weights = torch.full((3, TOP_K), 0.25, dtype=torch.float16)
    lane.take(crew, 0, torch.zeros(3, HIDDEN).half(), picks, weights, np.zeros(experts, np.int32), COSTS)
    assert weights.eq(0.25).all()
    out = torch.ones(3, HIDDEN)
    lane.add(out)
    assert out.eq(1).all()


def test_a_dropped_chunks_job_is_not_added_to_the_next(
    arena: ExpertArena, crew: Crew, lane: PrefillLane
) -> None:
    experts = arena.geometry.num_experts
    picks = torch.arange(2 * TOP_K).view(2, TOP_K)
    weights = torch.full((2, TOP_K), 0.25, dtype=torch.float16)
    table = np.full(experts, -1, np.int32)
    table[0] = 3
    lane.take(crew, 0, torch.ones(2, HIDDEN).half(), picks, weights, table, COSTS)
    lane.drop()
    out = torch.zeros(2, HIDDEN)
    lane.add(out)
    assert not out.any()


def test_the_pace_follows_the_workers(arena: ExpertArena, crew: Crew, lane: PrefillLane) -> None:
    experts = arena.geometry.num_experts
    x, table = torch.ones(2, HIDDEN).half(), np.full(experts, -1, np.int32)
    table[0] = 3  # the GPU keeps something
    fast = CostModel(0.1, 1e-9, 0.8, 0.004)  # no worker is as fast as these costs
    for _ in range(60):
        picks, weights = torch.arange(2 * TOP_K).view(2, TOP_K), torch.ones(2, TOP_K).half()
        lane.take(crew, 0, x, picks, weights, table, fast)
        lane.add(torch.zeros(2, HIDDEN))
    assert lane.pace > 4
    assert lane.work.num_jobs == 60
    assert lane.work.job_s > 0
