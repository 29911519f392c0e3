"""One expert of a layer shared by CPU workers and simulated GPU: the sums stay, parts count as parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glm53srv.kernels import Clamp, ExpertPart, ExpertTable, KernelPool, Precision
from glm53srv.model.checkpoint import CodebookName
from glm53srv.model.linear import KernelContext
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.layout import RecordLayout
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.simulated_gpu import SimulatedOffload
from glm53srv.offload.vram_plan import VramOptions
from tests.offload_device.builders import random_arena
from tests.offload_device.conftest import Model

HIDDEN, TOP_K, NUM_EXPERTS, NUM_STEPS = 256, 4, 24, 12
TOLERANCE = 2e-6
"""Sums of float32 in another order; the same products."""

OPTIONS = OffloadOptions(
    costs=CostOverrides(0.0, 0.4, 0.4),
    vram=VramOptions(max_slots=12),
    chunk_slots=2,
    deadline_ms=60_000,
    copies_per_step=8,
    calibrate_s=0.0,
)


def make_arena(blocks: int) -> ExpertArena:
    layout = RecordLayout(HIDDEN, 128 * blocks, (48, 48, 48), CodebookName.MUL1)
    return random_arena(layout, 2, NUM_EXPERTS, TOP_K)


def run(model: Model, arena: ExpertArena, options: OffloadOptions) -> SimulatedOffload:
    """Play decode steps; each layer's sum must be that of one plain call. Gives the offload, closed."""
    rng = np.random.default_rng(4)
    moe = replace(model.config.moe, num_experts=NUM_EXPERTS, expert_size=arena.layout.intermediate)
    config = replace(model.config, hidden_size=HIDDEN, moe=moe)
    with KernelPool(1) as pool:
        offload = SimulatedOffload(KernelContext(pool), config, arena, 3, options)
        tables = [ExpertTable([*arena.experts(layer), arena.experts(layer)[0]]) for layer in range(2)]
        for step in range(NUM_STEPS):
            rows = 1 + step % 3
            offload.begin_decode(rows)
            for layer in range(2):
                x = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
                routed = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(rows)])
                routed[:, 0] = routed[0, 0]  # an expert of all rows
                picks = np.concatenate([routed, np.full((rows, 1), NUM_EXPERTS)], axis=1).astype(np.int32)
                weights = rng.uniform(0.1, 1.0, picks.shape).astype(np.float32)
                y = offload.run_layer(layer, tables[layer], x, picks, weights)
                expected = pool.experts(x, tables[layer], picks, weights, config.swiglu_limit)
                assert np.linalg.norm(y - expected) < TOLERANCE * np.linalg.norm(expected)
            offload.end_decode()
        offload.close()
    return offload


@pytest.mark.parametrize("blocks", [2, 5, 16, 34])
def test_sums_stay_when_experts_are_shared(model: Model, blocks: int) -> None:
    offload = run(model, make_arena(blocks), OPTIONS)
    counts = offload.counts
    assert counts.num_split >= NUM_STEPS // 2
    assert counts.num_link >= counts.num_split


@pytest.mark.parametrize("options", [replace(OPTIONS, splits_experts=False), replace(OPTIONS, mode="exact")])
def test_nothing_is_shared_unless_asked_for(model: Model, options: OffloadOptions) -> None:
    assert run(model, make_arena(5), options).counts.num_split == 0


def test_an_expert_of_one_block_is_never_shared(model: Model) -> None:
    assert run(model, make_arena(1), OPTIONS).counts.num_split == 0


def test_the_workers_compute_parts_and_count_them_as_parts() -> None:
    arena, rng = make_arena(5), np.random.default_rng(2)
    mailbox = Mailbox(MailboxShape(2, TOP_K, HIDDEN, num_cells=2))
    x = rng.normal(size=(2, HIDDEN)).astype(np.float32)
    picks = np.array([[3, 7, -1, 9], [7, 3, 1, -1]], np.int32)  # four experts
    weights = rng.uniform(size=picks.shape).astype(np.float32)
    options = CrewOptions(2, precision=Precision.EXACT32, limit=10.0, deadline_ms=60_000)
    with Crew(arena, mailbox, options) as crew, KernelPool(1) as pool:
        for part, num_blocks in (
            (ExpertPart(7, 0, 2), 17),
            (None, 20),
        ):
            expected = pool.experts(x, arena.table(1), picks, weights, 10.0, Clamp.ACTIVATION, part=part)
            for _ in range(2):
                seq = crew.post(1, x, picks, weights, part)
                np.testing.assert_array_equal(crew.wait(seq, 2), expected)
                assert (mailbox.answer(seq).num_experts, mailbox.answer(seq).num_blocks) == (4, num_blocks)
        stats = crew.stats()
        assert (stats.num_experts, stats.num_whole) == (16, (2 * 17 + 2 * 20) / 5)
        assert stats.ms_per_expert == stats.busy_ms / stats.num_whole
        with pytest.raises(ValueError, match="from the first block on"):
            crew.post(1, x, picks, weights, ExpertPart(7, 2, 5))


@pytest.mark.parametrize(("blocks", "parts"), [(1, 1), (5, 5), (16, 16), (34, 2), (112, 16), (17, 1)])
def test_parts_are_whole_blocks(blocks: int, parts: int) -> None:
    layout = RecordLayout(128, 128 * blocks, (48, 48, 48), CodebookName.MUL1)
    assert layout.num_parts == parts
