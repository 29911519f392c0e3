"""The plan kernel under Triton's interpreter equals the pure rule, bit for bit, and fills the mailbox."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from glm53srv.offload.cost import CostModel, Parts, cpu_count_table
from glm53srv.offload.device.gpu.cpu_lane import make_ring
from glm53srv.offload.device.gpu.launch import (
    COUNT_WORDS,
    Ahead,
    Landing,
    PlanInputs,
    PlanOutputs,
    int32_bits,
    make_landing,
    power_of_two,
)
from glm53srv.offload.device.gpu.plan_kernel import launch_plan
from glm53srv.offload.device.gpu.point_kernel import launch_point
from glm53srv.offload.device.mailbox import LAYER, PICKS, POSTED, Mailbox, MailboxShape
from glm53srv.offload.look_ahead import MAX_AHEAD
from glm53srv.offload.offers import ABSENT, BARRED, RING_SLOTS, Keeping, Offers, keep_picks, wrapped
from glm53srv.offload.split import Lane, Split, split_picks

HIDDEN, RECORD, UP, DOWN, HOME, LANDING = 256, 36_864, 12_288, 24_576, 0x7000_0000_0000, 0x6000_0000_0000
SCALES, SCALES_BYTES, PART_BLOCKS = 0x5000_0000_0000, 4096, 3
AHEAD = 0x4000_0000_0000


@dataclass
class Case:
    """One random layer. Everything as numpy, so that the kernel cannot change what is expected."""

    rows: int
    top_k: int
    layer: int
    picks: np.ndarray
    weights: np.ndarray
    x: np.ndarray
    slots: np.ndarray
    heat: np.ndarray
    cpu_count: np.ndarray
    slot_addresses: np.ndarray
    num_landing: int
    offers: Offers
    head: int
    fetched: np.ndarray | None  # ahead of the layer, in order; None for a layer that is not guessed
    num_parts: int

    @property
    def num_picks(self) -> int:
        return self.rows * self.top_k

    def split(self) -> Split:
        picks = self.picks.reshape(1, -1)
        fetched = None if self.fetched is None else self.fetched[None]
        return split_picks(picks, self.slots[None], self.heat[None], self.cpu_count, fetched, self.num_parts)

    def keeping(self) -> Keeping:
        """What the rule of offers says."""
        picks, slots, heat = self.picks.reshape(1, -1), self.slots[None], self.heat[None]
        return keep_picks(picks, self.split(), slots, heat, self.offers, self.head, self.num_landing)

    def inputs(self) -> PlanInputs:
        def copy(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.copy())

        return PlanInputs(
            picks=copy(self.picks),
            weights=copy(self.weights),
            x=copy(self.x),
            slots=copy(self.slots),
            heat=copy(self.heat),
            cpu_count=copy(self.cpu_count),
            own_scales=torch.from_numpy(self.own_scales()),
            slot_addresses=copy(self.slot_addresses),
            offers=torch.from_numpy(self.offers.words()),
            offer_head=torch.full((1,), self.head, dtype=torch.int32),
            home=HOME,
            layer=self.layer,
            record_bytes=RECORD,
            up_offset=UP,
            down_offset=DOWN,
            num_parts=self.num_parts,
            part_blocks=PART_BLOCKS,
        )

    def own_scales(self) -> np.ndarray:
        return SCALES + SCALES_BYTES * np.arange(len(self.slots), dtype=np.int64)

    def outputs(self) -> PlanOutputs:
        experts = len(self.slots)
        return PlanOutputs(
            gate_table=torch.full((experts,), 7, dtype=torch.int64),
            up_table=torch.full((experts,), 7, dtype=torch.int64),
            down_table=torch.full((experts,), 7, dtype=torch.int64),
            scale_table=torch.full((experts,), 7, dtype=torch.int64),
            log_picks=torch.full((self.num_picks,), 99, dtype=torch.int32),
            log_lanes=torch.full((self.num_picks,), 99, dtype=torch.int8),
            log_kept=torch.full((self.num_picks,), 99, dtype=torch.int32),
            counts=torch.full((COUNT_WORDS,), 99, dtype=torch.int32),
        )


def landing_for(case: Case) -> Landing:
    width = max(1, case.num_landing)
    sources, targets = torch.full((2, width), 7, dtype=torch.int64)
    return Landing(
        LANDING,
        case.num_landing,
        sources,
        targets,
        count=torch.full((1,), 99, dtype=torch.int32),
        skips=torch.full((width,), 99, dtype=torch.int32),
        scales=torch.zeros(8, dtype=torch.float16),
        mask=torch.full((2,), 99, dtype=torch.int64),
    )


def ahead_for(case: Case) -> Ahead | None:
    """What was fetched for the layer, among words that a kernel must not take for it."""
    if case.fetched is None:
        return None
    experts = torch.full((MAX_AHEAD,), int(case.picks.max(initial=0)), dtype=torch.int64)
    experts[: len(case.fetched)] = torch.from_numpy(case.fetched)
    sources, targets = torch.full((2, MAX_AHEAD), 7, dtype=torch.int64)
    count = torch.full((1,), len(case.fetched), dtype=torch.int32)
    unused = make_landing(torch.zeros((MAX_AHEAD, 1), dtype=torch.uint8))
    fetches = replace(unused, address=AHEAD, sources=sources, targets=targets, count=count)
    keeps = replace(
        fetches, sources=sources.clone(), targets=targets.clone(), count=torch.full_like(count, 99)
    )
    return Ahead(experts, fetches, keeps, torch.full((2,), 99, dtype=torch.int32))


def random_fetches(rng: np.random.Generator, picks: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
    """Experts without a slot, picked or not, or None."""
    absent = np.flatnonzero(slots == ABSENT)
    picked = np.intersect1d(absent, picks)
    right = rng.permutation(picked)[: int(rng.integers(0, 4))]
    wrong = rng.permutation(np.setdiff1d(absent, picked))[: int(rng.integers(0, 4))]
    return None if rng.random() < 0.3 else rng.permutation(np.concatenate([right, wrong]))[:MAX_AHEAD]


def random_case(rng: np.random.Generator) -> Case:
    rows, top_k = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    num_experts = int(rng.integers(top_k, 65))
    num_slots = int(rng.integers(1, num_experts + 1))
    # Few distinct experts, so that rows share them; a row's picks are distinct, some are absent.
    pool = rng.permutation(num_experts)[: max(top_k, int(rng.integers(top_k, 2 * top_k + 1)))]
    picks = np.stack([rng.permutation(pool)[:top_k] for _ in range(rows)]).astype(np.int64)
    picks[rng.random(picks.shape) < rng.choice([0.0, 0.1, 1.0], p=[0.6, 0.37, 0.03])] = -1
    slots = np.where(
        rng.random(num_experts) < rng.random(), rng.integers(0, num_slots, num_experts), -1
    ).astype(np.int32)
    slots[(slots < 0) & (rng.random(num_experts) < 0.3)] = BARRED
    heat = rng.integers(0, rng.choice([2, 5, 2**31 - 1]), num_experts).astype(np.int32)  # ties are common
    costs = CostModel(*rng.uniform([0.0, 0.05, 0.05, 0.0], [0.4, 1.0, 1.0, 0.2]).tolist())
    mode = rng.choice(["fast", "fast", "fast", "exact"])
    num_landing = int(rng.choice([0, 1, 2, 3, 5, 32, 32, 32, 32]))
    parts = Parts(int(rng.choice([1, 5, 16, 16])))
    parts = replace(parts, num_landing=int(rng.choice([0, num_landing, num_landing])))
    return Case(
        rows,
        top_k,
        int(rng.integers(0, 42)),
        picks,
        rng.uniform(0.01, 1.0, (rows, top_k)).astype(np.float16),
        rng.normal(size=(rows, HIDDEN)).astype(np.float16),
        slots,
        heat,
        cpu_count_table(costs, 4 * 8, mode, parts),
        rng.integers(2**40, 2**46, num_slots).astype(np.int64) * 256,
        num_landing,
        *random_offers(rng, num_slots, heat),
        random_fetches(rng, picks, slots),
        parts.num_parts,
    )


def random_offers(rng: np.random.Generator, num_slots: int, heat: np.ndarray) -> tuple[Offers, int]:
    """Offers of which some may be taken, and the number that the device has come to; about to wrap around."""
    head, num_open = int(rng.integers(2**31 - 3, 2**31 + 3)), int(rng.integers(0, 5))
    first = head + int(rng.integers(-5, 4))  # behind it: all open offers but the newest were withdrawn
    ring = rng.integers(0, num_slots, RING_SLOTS).astype(np.int32)
    threshold = int(rng.choice(heat)) if rng.random() < 0.5 else 0
    tail = max(first, head) + num_open
    return Offers(threshold, wrapped(first), wrapped(tail), ring), wrapped(head)


def check_case(
    case: Case,
    inputs: PlanInputs,
    outputs: PlanOutputs,
    landing: Landing,
    ahead: Ahead | None,
    hit_weights: torch.Tensor | None = None,
) -> Split:
    """Compare everything but the mailbox with the rules."""
    split, keeping, weights = case.split(), case.keeping(), inputs.weights
    kept = keeping.slots[0]
    np.testing.assert_array_equal(outputs.log_kept.numpy(), kept)
    assert int(inputs.offer_head) == keeping.head
    entries = case.slots.copy()
    entries[case.picks.reshape(-1)[kept >= 0]] = kept[kept >= 0]
    np.testing.assert_array_equal(inputs.slots.numpy(), entries)
    lanes = split.lanes[0]
    flat = case.picks.reshape(-1)
    np.testing.assert_array_equal(outputs.log_picks.numpy(), flat)
    np.testing.assert_array_equal(outputs.log_lanes.numpy(), lanes)
    np.testing.assert_array_equal(
        outputs.counts.numpy()[[0, 1, 2, 6]],
        [split.num_hits[0], split.num_link[0], split.num_cpu[0], split.share[0] * PART_BLOCKS],
    )
    shaped = lanes.reshape(case.picks.shape)
    elsewhere = [Lane.CPU] if hit_weights is None else [Lane.CPU, Lane.VRAM]
    masked = np.where(np.isin(shaped, elsewhere) & (case.picks >= 0), np.float16(0), case.weights)
    np.testing.assert_array_equal(weights.numpy(), masked)
    if hit_weights is not None:
        is_hit = (shaped == Lane.VRAM) & (case.picks >= 0)
        np.testing.assert_array_equal(hit_weights.numpy(), np.where(is_hit, case.weights, np.float16(0)))
    fetched = [] if case.fetched is None else case.fetched.tolist()
    right = [expert for expert in fetched if expert in flat]
    assert sorted(flat[split.is_ahead[0]].tolist()) == sorted(right)
    over_link = flat[
        split.standing[0] & np.isin(lanes, (Lane.LINK, Lane.SPLIT)) & ~split.is_ahead[0]
    ].tolist()
    landed = over_link[: case.num_landing]  # in the order of their first picks
    count = int(landing.count)
    assert count == len(landed)
    assert landing.sources[:count].tolist() == [HOME + expert * RECORD for expert in landed]
    targets = {expert: LANDING + index * RECORD for index, expert in enumerate(landed)}
    places = [place for place in np.flatnonzero(kept >= 0) if not split.is_ahead[0, place]]
    targets |= {int(flat[place]): int(case.slot_addresses[kept[place]]) for place in places}
    assert landing.targets[:count].tolist() == [targets[expert] for expert in landed]
    assert (landing.sources[count:] == 7).all()
    expected = np.full(len(case.slots), 7, np.int64)
    for expert in np.unique(flat[flat >= 0]):
        slot = case.slots[expert]
        expected[expert] = case.slot_addresses[slot] if slot >= 0 else HOME + expert * RECORD
        if expert in landed:
            expected[expert] = targets[expert]
        if expert in right:
            expected[expert] = AHEAD + fetched.index(expert) * RECORD
    np.testing.assert_array_equal(outputs.gate_table.numpy(), expected)
    np.testing.assert_array_equal(outputs.up_table.numpy(), np.where(expected == 7, 7, expected + UP))
    np.testing.assert_array_equal(outputs.down_table.numpy(), np.where(expected == 7, 7, expected + DOWN))
    if ahead is not None:
        check_ahead(case, ahead, split, kept)
    return split


def check_sharing(case: Case, outputs: PlanOutputs, landing: Landing, split: Split) -> None:
    """Compare what a shared expert changes: its copy, its scales, and those of the other picks."""
    flat, blocks = case.picks.reshape(-1), int(split.share[0]) * PART_BLOCKS
    is_copied = np.isin(split.lanes[0], (Lane.LINK, Lane.SPLIT)) & ~split.is_ahead[0]
    over_link = flat[split.standing[0] & is_copied].tolist()
    shared = {int(expert) for expert in flat[split.lanes[0] == Lane.SPLIT]}
    assert len(shared) == (blocks > 0)
    count = int(landing.count)
    wanted = [blocks if expert in shared else 0 for expert in over_link[: case.num_landing]]
    assert landing.skips[:count].tolist() == wanted
    if shared:
        assert shared <= set(over_link[: case.num_landing])  # the table shares nothing that does not land
    own = case.own_scales()
    assert landing.mask.tolist() == [sum(int(own[expert]) for expert in shared), blocks]
    expected = np.full(len(case.slots), 7, np.int64)
    for expert in np.unique(flat[flat >= 0]):
        expected[expert] = landing.scales.data_ptr() if expert in shared else own[expert]
    np.testing.assert_array_equal(outputs.scale_table.numpy(), expected)


def check_ahead(case: Case, ahead: Ahead, split: Split, kept: np.ndarray) -> None:
    """Compare what the plan says of the experts that were fetched ahead."""
    fetched, flat = case.fetched, case.picks.reshape(-1)
    assert fetched is not None
    assert ahead.told.tolist() == [len(fetched), int(split.is_ahead.sum())]
    stays = np.flatnonzero(split.is_ahead[0] & (kept >= 0))
    count = int(ahead.keeps.count)
    assert count == len(stays)
    places = [fetched.tolist().index(flat[place]) for place in stays]
    assert ahead.keeps.sources[:count].tolist() == [AHEAD + place * RECORD for place in places]
    assert ahead.keeps.targets[:count].tolist() == case.slot_addresses[kept[stays]].tolist()
    assert (ahead.fetches.sources == 7).all()  # no business of the plan's


def check_mail(case: Case, mailbox: Mailbox, seq: int, split: Split) -> None:
    cell = mailbox.cell(seq)
    is_cpu = np.isin(split.lanes[0], (Lane.CPU, Lane.SPLIT))
    layer, rows, num_picks, x_kind, shared, blocks = cell[LAYER : LAYER + 24].view(np.int32).tolist()
    assert (layer, num_picks, x_kind) == (case.layer, case.top_k, 1)
    assert blocks == split.share[0] * PART_BLOCKS
    if blocks:
        assert set(case.picks.reshape(-1)[split.lanes[0] == Lane.SPLIT]) == {shared}
    assert rows == (case.rows if is_cpu.any() else 0)
    flat = case.picks.reshape(-1)
    picks = cell[PICKS : PICKS + 4 * case.num_picks].view(np.int32)
    np.testing.assert_array_equal(picks, np.where(is_cpu, flat, -1))
    begin = mailbox.weights_offset
    weights = cell[begin : begin + 4 * case.num_picks].view(np.float32)
    np.testing.assert_array_equal(weights, case.weights.reshape(-1).astype(np.float32))
    if is_cpu.any():
        begin = mailbox.x_offset
        x = cell[begin : begin + 2 * case.rows * HIDDEN].view(np.float16)
        np.testing.assert_array_equal(x, case.x.reshape(-1))
    assert int(cell[POSTED : POSTED + 4].view(np.uint32)[0]) == seq


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
def test_plan_equals_the_rule_and_fills_the_mailbox(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mailbox = Mailbox(MailboxShape(4, 8, HIDDEN, num_cells=4, first_seq=2**32 - 100))
    ring = make_ring(mailbox, "cpu")
    num_on_cpu = num_kept = num_split = 0
    num_ahead = num_kept_ahead = 0
    for number in range(400):
        case, seq = random_case(rng), (2**32 - 100 + number) % 2**32
        inputs, outputs, landing = case.inputs(), case.outputs(), landing_for(case)
        ahead = ahead_for(case)
        ring.first_seq.fill_(int32_bits(seq - case.layer))
        hit_weights = torch.full_like(inputs.weights, 99.0) if number % 2 else None
        launch_plan(inputs, outputs, landing, ring, ahead, hit_weights)
        split = check_case(case, inputs, outputs, landing, ahead, hit_weights)
        check_sharing(case, outputs, landing, split)
        check_mail(case, mailbox, seq, split)
        num_split += int(split.share[0] > 0)
        num_on_cpu += int(split.num_cpu[0])
        num_kept += int((outputs.log_kept >= 0).sum())
        num_ahead += int(split.is_ahead.sum())
        num_kept_ahead += int(((outputs.log_kept.numpy() >= 0) & split.is_ahead[0]).sum())
    assert num_on_cpu > 200
    assert num_kept > 50
    assert num_ahead > 100
    assert num_kept_ahead > 10
    assert num_split > 30


def test_exact_mode_needs_no_mailbox() -> None:
    rng = np.random.default_rng(5)
    for _ in range(100):
        case = random_case(rng)
        case.cpu_count[:] = 0
        inputs, outputs, landing = case.inputs(), case.outputs(), landing_for(case)
        ahead = ahead_for(case)
        launch_plan(inputs, outputs, landing, None, ahead)
        check_case(case, inputs, outputs, landing, ahead)


def test_a_table_too_small_for_the_picks_is_refused() -> None:
    case = random_case(np.random.default_rng(0))
    case.cpu_count = case.cpu_count[: case.num_picks, : case.num_picks]
    with pytest.raises(ValueError, match="does not cover"):
        launch_plan(case.inputs(), case.outputs(), landing_for(case), None)


@pytest.mark.parametrize("num_experts", [1, 127, 128, 129, 288])
def test_pointing_fills_the_whole_table(num_experts: int) -> None:
    rng = np.random.default_rng(num_experts)
    slots = rng.integers(-1, 20, num_experts).astype(np.int32)
    addresses = rng.integers(2**40, 2**46, 20).astype(np.int64) * 256
    gate, up, down, scales = (torch.zeros(num_experts, dtype=torch.int64) for _ in range(4))
    own = torch.arange(num_experts, dtype=torch.int64) + 5
    unused = torch.zeros(1, dtype=torch.int32)
    outputs = PlanOutputs(gate, up, down, scales, unused, unused, unused, unused)
    layout = (RECORD, UP, DOWN)
    launch_point(torch.from_numpy(slots), torch.from_numpy(addresses), outputs, own, HOME, layout)
    assert torch.equal(scales, own)
    expected = np.where(slots >= 0, addresses[slots], HOME + np.arange(num_experts) * RECORD)
    for table, offset in zip((gate, up, down), (0, UP, DOWN), strict=True):
        np.testing.assert_array_equal(table.numpy(), expected + offset)


def test_numbers_keep_their_bits() -> None:
    for number in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5):
        assert np.int32(int32_bits(number)).view(np.uint32) == number % 2**32
    assert [power_of_two(count) for count in (1, 2, 3, 8, 9, 32)] == [1, 2, 4, 8, 16, 32]
