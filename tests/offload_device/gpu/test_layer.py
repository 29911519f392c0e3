"""A whole decode layer: kernels plan, post and combine, the crew computes; one plain sum must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm53srv.exl3_matrix import ExpertTable
from glm53srv.kernels import Clamp, KernelPool, Precision
from glm53srv.model.checkpoint import CodebookName
from glm53srv.offload.cost import CostModel, Parts, cpu_count_table
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.copy_kernel import launch_gather
from glm53srv.offload.device.gpu.cpu_lane import make_ring
from glm53srv.offload.device.gpu.launch import COUNT_WORDS, PlanInputs, PlanOutputs, cut_of, make_landing
from glm53srv.offload.device.gpu.plan_kernel import launch_plan
from glm53srv.offload.device.gpu.table_kernel import launch_update
from glm53srv.offload.device.layout import Part, RecordLayout
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape
from glm53srv.offload.device.region import Region
from glm53srv.offload.offers import RING_SLOTS, Offers
from glm53srv.offload.split import Lane
from tests.offload_device.builders import random_arena
from tests.offload_device.gpu.pointing import pointed_table

COSTS = CostModel(0.0, 0.4, 0.4, 0.03)
HIDDEN, TOP_K, NUM_SLOTS, LIMIT = 256, 4, 10, 10.0
TOLERANCE = 2e-6
"""Two sums of float32 in another order than one; the same products."""


class Card:
    """What a GPU holds of one layer, in host memory: slots, table, pointer tables."""

    def __init__(self, arena: ExpertArena, layer: int) -> None:
        own = [arena.suh(layer, e, Part.DOWN).ctypes.data for e in range(arena.geometry.num_experts)]
        self.own_scales = torch.tensor(own, dtype=torch.int64)
        self.arena, self.layer = arena, layer
        experts = arena.geometry.num_experts
        self.memory = Region(NUM_SLOTS * arena.layout.record_bytes)
        slots = self.memory.address + np.arange(NUM_SLOTS, dtype=np.int64) * arena.layout.record_bytes
        self.slot_addresses = torch.from_numpy(slots)
        self.table = torch.full((arena.geometry.num_layers, experts), -1, dtype=torch.int32)
        self.outputs = PlanOutputs(
            gate_table=torch.zeros(experts, dtype=torch.int64),
            up_table=torch.zeros(experts, dtype=torch.int64),
            down_table=torch.zeros(experts, dtype=torch.int64),
            scale_table=self.own_scales.clone(),
            log_picks=torch.zeros(16, dtype=torch.int32),
            log_lanes=torch.zeros(16, dtype=torch.int8),
            log_kept=torch.zeros(16, dtype=torch.int32),
            counts=torch.zeros(COUNT_WORDS, dtype=torch.int32),
        )

    def admit(self, experts: np.ndarray) -> None:
        """Copy experts into the first slots and map them, all by kernels."""
        keys = (self.layer * self.arena.geometry.num_experts + experts).astype(np.int32)
        homes = self.arena.region.address + keys.astype(np.int64) * self.arena.layout.record_bytes
        targets = self.slot_addresses[: len(experts)]
        copies = make_landing(torch.zeros((NUM_SLOTS, 1), dtype=torch.uint8))
        copies.sources[: len(experts)], copies.targets[: len(experts)] = torch.from_numpy(homes), targets
        copies.count.fill_(len(experts))
        launch_gather(copies, self.arena.layout.record_bytes)
        slots = torch.arange(len(experts), dtype=torch.int32)
        none = torch.zeros(0, dtype=torch.int32)
        launch_update(self.table, none, none, torch.from_numpy(keys), slots)

    def pointed(self) -> ExpertTable:
        """Give what the pointer tables say."""
        outputs = self.outputs
        matrices = (outputs.gate_table, outputs.up_table, outputs.down_table)
        return pointed_table(self.arena, self.layer, matrices, outputs.scale_table)


@pytest.fixture(scope="module")
def arena_of_many_blocks() -> ExpertArena:
    """Random experts of five blocks; up is packed otherwise than gate."""
    return random_arena(RecordLayout(HIDDEN, 640, (48, 40, 64), CodebookName.MUL1), 2, 24, TOP_K)


@pytest.fixture(params=["one block", "five blocks"])
def any_arena(
    request: pytest.FixtureRequest, arena: ExpertArena, arena_of_many_blocks: ExpertArena
) -> ExpertArena:
    return arena if request.param == "one block" else arena_of_many_blocks


@pytest.mark.parametrize("num_landing", [0, 2, 16])
@pytest.mark.parametrize("seed", range(12))
def test_the_lanes_of_a_layer_add_up(any_arena: ExpertArena, seed: int, num_landing: int) -> None:
    arena = any_arena
    rng = np.random.default_rng(seed)
    layer, rows = int(rng.integers(arena.geometry.num_layers)), int(rng.integers(1, 5))
    card = Card(arena, layer)
    num_slots = int(rng.integers(0, NUM_SLOTS + 1))
    card.admit(rng.permutation(arena.geometry.num_experts)[:num_slots])
    ring_slots = np.full(RING_SLOTS, -1, np.int32)
    ring_slots[: NUM_SLOTS - num_slots] = np.arange(num_slots, NUM_SLOTS)
    offers = Offers(0, 0, int(rng.integers(0, NUM_SLOTS - num_slots + 1)), ring_slots)
    head = torch.zeros(1, dtype=torch.int32)
    mailbox = Mailbox(MailboxShape(4, TOP_K, HIDDEN, num_cells=2))
    pool_of_experts = rng.permutation(arena.geometry.num_experts)[:9]
    picks = np.stack([rng.permutation(pool_of_experts)[:TOP_K] for _ in range(rows)]).astype(np.int64)
    weights = rng.uniform(0.05, 1.0, (rows, TOP_K)).astype(np.float16)
    x = rng.normal(size=(rows, HIDDEN)).astype(np.float16)
    heat = rng.integers(0, 100, arena.geometry.num_experts).astype(np.int32)
    num_parts = arena.layout.num_parts
    inputs = PlanInputs(
        picks=torch.from_numpy(picks),
        weights=torch.from_numpy(weights.copy()),
        x=torch.from_numpy(x),
        slots=card.table[layer],
        heat=torch.from_numpy(heat),
        cpu_count=torch.from_numpy(cpu_count_table(COSTS, 32, "fast", Parts(num_parts, num_landing))),
        own_scales=card.own_scales,
        slot_addresses=card.slot_addresses,
        offers=torch.from_numpy(offers.words()),
        offer_head=head,
        home=arena.address(layer, 0),
        layer=layer,
        record_bytes=arena.layout.record_bytes,
        up_offset=arena.layout.offsets[1],
        down_offset=arena.layout.offsets[2],
        num_parts=num_parts,
        part_blocks=arena.layout.num_blocks // num_parts,
    )
    buffers = torch.full((num_landing, arena.layout.record_bytes), 0xEE, dtype=torch.uint8)
    landing = make_landing(buffers, arena.layout.intermediate)
    options = CrewOptions(1, precision=Precision.EXACT32, limit=LIMIT, deadline_ms=60_000)
    with Crew(arena, mailbox, options) as crew, KernelPool(1) as pool:
        crew.ring()
        ring = make_ring(mailbox, "cpu")
        ring.first_seq.fill_(1 - layer)
        hit_weights = torch.zeros_like(inputs.weights) if seed % 2 else None
        launch_plan(inputs, card.outputs, landing, ring, None, hit_weights)

        wide = x.astype(np.float32)

        def run(taken: torch.Tensor) -> torch.Tensor:
            kept = taken.numpy().astype(np.float32)
            on_gpu = np.where(kept == 0, -1, picks).astype(np.int32)
            return torch.from_numpy(pool.experts(wide, card.pointed(), on_gpu, kept, LIMIT, Clamp.ACTIVATION))

        hit_sums = None if hit_weights is None else run(hit_weights)  # nothing else has landed yet
        launch_gather(landing, arena.layout.record_bytes, cut=cut_of(arena.layout))
        total = run(inputs.weights)
        launch_combine(total, card.outputs.counts, layer, ring, hit_sums)  # waits for the crew by itself
        crew.check()
        table = arena.table(layer)
        whole = weights.astype(np.float32)
        expected = pool.experts(wide, table, picks.astype(np.int32), whole, LIMIT, Clamp.ACTIVATION)
    error = np.linalg.norm(total.numpy() - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE
    hits, link, cpu, *_, blocks, _ = card.outputs.counts.tolist()
    assert hits + link + cpu == len(np.unique(picks))
    assert int(head) == min(offers.tail, num_landing, link - (blocks > 0))
    assert blocks < arena.layout.num_blocks
    if blocks:
        assert (card.outputs.log_lanes == Lane.SPLIT).any()
    if arena.layout.num_blocks == 1 or num_landing == 0:
        assert blocks == 0
    for expert in np.flatnonzero(card.table[layer].numpy() >= 0):  # each slot holds its expert, whole
        slot = int(card.table[layer, expert])
        record = card.memory.array()[slot * arena.layout.record_bytes :][: arena.layout.record_bytes]
        np.testing.assert_array_equal(record, arena.records[layer * arena.geometry.num_experts + expert])


def test_a_layer_is_shared_at_times(arena_of_many_blocks: ExpertArena) -> None:
    # Else the test above would not say anything about shared experts: with three misses of equal cost on
    # either lane, one and a half each.
    table = cpu_count_table(COSTS, 32, "fast", Parts(arena_of_many_blocks.layout.num_parts, 16))
    assert (table[:8, 1:8] % 5 > 0).sum() > 20
