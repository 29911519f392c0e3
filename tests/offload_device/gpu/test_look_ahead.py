"""Guess, fetch and keep of a stack of layers: what is computed from what, and who waits for whom.

Kernels run at once under the interpreter, so streams are fakes that note what each waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from glm53srv.errors import EngineError
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.gpu import look_ahead
from glm53srv.offload.device.gpu.copy_kernel import launch_gather
from glm53srv.offload.device.gpu.landing_order import LayerWork, enqueue_copies
from glm53srv.offload.device.gpu.launch import (
    COUNT_WORDS,
    PlanInputs,
    PlanOutputs,
    RouterWeights,
    make_landing,
)
from glm53srv.offload.device.gpu.look_ahead import GuessedModel, LookAhead, SideStreams
from glm53srv.offload.device.gpu.order_kernel import launch_await
from glm53srv.offload.device.gpu.plan_kernel import launch_plan
from glm53srv.offload.device.region import Region
from glm53srv.offload.look_ahead import choose_guesses, list_guesses
from glm53srv.offload.offers import RING_SLOTS, Offers
from glm53srv.offload.split import Lane
from tests.offload_device.copy_engine import STREAM, CopyEngine

NUM_LAYERS = 8
CUTS = (0, 3, 6)  # layers that follow no other in one graph
STACKS: list[Stack] = []


@pytest.fixture(autouse=True)
def no_courier_stays() -> Iterator[None]:
    yield
    while STACKS:
        STACKS.pop().close()


@dataclass
class FakeStream:
    """Knows what has happened before whatever comes next on it: `seen`. Its work is named in order."""

    name: str
    seen: set[str] = field(default_factory=set)

    def record_event(self) -> frozenset[str]:
        return frozenset(self.seen)

    def wait_event(self, event: frozenset[str]) -> None:
        self.seen |= event


@dataclass
class Schedule:
    """Fake streams, and for each piece of work what was certain to be done before it began."""

    main: FakeStream = field(default_factory=lambda: FakeStream("main"))
    guesses: FakeStream = field(default_factory=lambda: FakeStream("guess"))
    fetches: FakeStream = field(default_factory=lambda: FakeStream("keep"))
    landings: FakeStream = field(default_factory=lambda: FakeStream("gather"))
    shared: FakeStream = field(default_factory=lambda: FakeStream("shared"))
    before: dict[str, frozenset[str]] = field(default_factory=dict)
    layer: int = 0

    def streams(self) -> SideStreams:
        return SideStreams(
            self.guesses,
            self.fetches,
            self.landings,
            self.shared,
            main=lambda: self.main,
            on=self.on,
        )

    def run(self, stream: FakeStream, work: str) -> None:
        self.before[work] = frozenset(stream.seen)
        stream.seen.add(work)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Name what runs: a guess and the order behind it are for the next layer."""
        work = f"{stream.name} {self.layer + (stream is self.guesses)}"
        if work in self.before:
            work = f"order {self.layer + 1}"
        yield
        self.run(stream, work)


class Stack:
    """Layers on a card without workers: tables, slots, a landing, routers, and the look-ahead around them."""

    def __init__(
        self,
        arena: ExpertArena,
        num_ahead: int,
        seed: int,
        rows: int,
        *,
        runs_hits_first: bool = False,
        crosses: bool = False,
        has_courier: bool = True,
    ) -> None:
        unguessed = CUTS[:1] if crosses else CUTS
        self.arena, self.schedule, self.rows = arena, Schedule(), rows
        self.runs_hits_first = runs_hits_first
        self.rng = np.random.default_rng(seed)
        experts, hidden = arena.geometry.num_experts, arena.layout.hidden
        self.num_arena_layers = arena.geometry.num_layers
        self.num_slots = 24
        self.memory = Region(self.num_slots * arena.layout.record_bytes)
        self.memory.array()[:] = 0xA5
        size = arena.layout.record_bytes
        self.addresses = torch.from_numpy(
            self.memory.address + np.arange(self.num_slots, dtype=np.int64) * size
        )
        self.slots = [torch.full((experts,), -1, dtype=torch.int32) for _ in range(NUM_LAYERS)]
        self.gates = [
            torch.from_numpy(self.rng.normal(size=(hidden, experts)) / hidden**0.5).half()
            for _ in range(NUM_LAYERS)
        ]
        bias = torch.from_numpy(self.rng.normal(size=experts).astype(np.float32)) / 8
        routers = [
            None if layer in unguessed else RouterWeights(gate, bias) for layer, gate in enumerate(self.gates)
        ]
        across = [layer in CUTS and layer not in unguessed for layer in range(NUM_LAYERS)]
        self.bias = bias
        homes = [arena.address(layer % self.num_arena_layers, 0) for layer in range(NUM_LAYERS)]
        geometry = type(arena.geometry)(
            NUM_LAYERS, experts, arena.geometry.top_k, arena.geometry.expert_bytes
        )
        model = GuessedModel(geometry, size, routers, across, self.slots, homes)
        device = torch.device("cpu")
        self.courier = Courier(16) if has_courier else None
        self.ahead = LookAhead(model, num_ahead, 4, device, self.schedule.streams(), self.courier)
        self.engine = CopyEngine()
        if self.courier is not None:
            STACKS.append(self)  # what a thread writes to stays until it has ended
            assert self.ahead.arrived is not None
            self.courier.start(self.engine.calls(), size, STREAM, self.ahead.arrived.data_ptr())
        self.landed = torch.zeros((16, size), dtype=torch.uint8)
        self.landing = make_landing(self.landed)
        self.head = torch.zeros(1, dtype=torch.int32)
        self.homes = homes
        ring = np.zeros(RING_SLOTS, np.int32)
        ring[: self.num_slots] = np.arange(self.num_slots)
        self.offers = Offers(0, 0, 0, ring)
        self.taken: list[tuple[int, int, int]] = []

    def close(self) -> None:
        self.engine.release()
        if self.courier is not None:
            self.courier.close()

    def scores(self, layer: int, x: torch.Tensor) -> np.ndarray:
        logits = x.float() @ self.gates[layer].float()
        scores: np.ndarray = (torch.sigmoid(logits) + self.bias).numpy()
        return scores

    def run_layer(self, layer: int, x: torch.Tensor, picks: np.ndarray) -> PlanOutputs:
        """Do what GpuOffload does of a decode layer; gives what the plan wrote, with everything checked."""
        schedule, ahead = self.schedule, self.ahead
        schedule.layer = layer
        experts, top_k = len(self.slots[layer]), picks.shape[1]
        tables = [torch.zeros(experts, dtype=torch.int64) for _ in range(3)]
        words = [torch.zeros(picks.size, dtype=torch.int32) for _ in range(2)]
        lanes = torch.zeros(picks.size, dtype=torch.int8)
        counts = torch.zeros(COUNT_WORDS, dtype=torch.int32)
        outputs = PlanOutputs(
            tables[0], tables[1], tables[2], torch.zeros_like(tables[2]), words[0], lanes, words[1], counts
        )
        layout = self.arena.layout
        inputs = PlanInputs(
            picks=torch.from_numpy(picks.copy()),
            weights=torch.ones(picks.shape, dtype=torch.half),
            x=x,
            slots=self.slots[layer],
            heat=torch.zeros(experts, dtype=torch.int32),
            cpu_count=torch.zeros((4 * top_k + 1, 4 * top_k + 1), dtype=torch.int32),
            own_scales=torch.zeros_like(tables[2]),
            slot_addresses=self.addresses,
            offers=torch.from_numpy(self.offers.words()),
            offer_head=self.head,
            home=self.homes[layer],
            layer=layer,
            record_bytes=layout.record_bytes,
            up_offset=layout.offsets[1],
            down_offset=layout.offsets[2],
            num_parts=1,
            part_blocks=1,
        )
        ready = schedule.main.record_event()
        launch_plan(inputs, outputs, self.landing, None, ahead.ahead_of(layer))
        schedule.run(schedule.main, f"plan {layer}")
        planned = schedule.main.record_event()

        def gather() -> None:
            launch_gather(self.landing, layout.record_bytes)
            if not self.runs_hits_first:
                schedule.run(schedule.main, f"gather {layer}")

        def run_hits() -> None:
            schedule.run(schedule.main, f"hits {layer}")

        first = run_hits if self.runs_hits_first else None
        work = LayerWork(planned, ready, x, gather, first, lambda: None)
        enqueue_copies(schedule.streams(), ahead, layer, work)
        self.check_experts(layer, picks, outputs)
        schedule.run(schedule.main, f"experts {layer}")
        ahead.join(layer)
        return outputs

    def check_experts(self, layer: int, picks: np.ndarray, outputs: PlanOutputs) -> None:
        """Read every picked expert where the plan points, as its kernels would."""
        for expert in np.unique(picks):
            where = int(outputs.gate_table[expert])
            found = np.ctypeslib.as_array(
                (ctypes.c_uint8 * self.arena.layout.record_bytes).from_address(where)
            )
            np.testing.assert_array_equal(found, self.record(layer, int(expert)))

    def record(self, layer: int, expert: int) -> np.ndarray:
        key = layer % self.num_arena_layers * self.arena.geometry.num_experts + expert
        record: np.ndarray = self.arena.records[key]
        return record

    def draw(self) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=(self.rows, self.arena.layout.hidden))).half()


@pytest.mark.parametrize("num_ahead", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_guesses_follow_the_rule_and_right_ones_are_computed_from_their_buffers(
    arena: ExpertArena, rows: int, num_ahead: int
) -> None:
    stack = Stack(arena, num_ahead, seed=rows, rows=rows)
    top_k = arena.geometry.top_k
    stack.offers = Offers(0, 0, stack.num_slots, stack.offers.ring)
    expected = np.zeros((NUM_LAYERS, 2), np.int32)
    num_kept = 0
    x = None
    for layer in range(NUM_LAYERS):
        guessed = np.empty(0, np.int32)
        if layer not in CUTS:
            assert x is not None
            lists = list_guesses(stack.scores(layer, x), top_k)
            guessed = choose_guesses(lists, stack.slots[layer].numpy(), num_ahead)
            assert len(guessed) == num_ahead
        x = stack.draw()
        picks = list_guesses(stack.scores(layer, x), top_k).astype(np.int64)
        if len(guessed) and layer % 2:  # a layer that picks what was guessed, in its last row
            picks[-1] = [guessed[0], *[each for each in picks[-1] if each != guessed[0]][: top_k - 1]]
        outputs = stack.run_layer(layer, x, picks)
        right = np.intersect1d(guessed, picks)
        if layer not in CUTS:
            expected[layer] = len(guessed), len(right)
        lanes = outputs.log_lanes.numpy()
        assert (lanes == Lane.LINK).all()
        kept = outputs.log_kept.numpy().reshape(picks.shape)
        for expert, slot in zip(picks[kept >= 0], kept[kept >= 0], strict=True):
            size = arena.layout.record_bytes
            found = stack.memory.array()[int(slot) * size :][:size]
            np.testing.assert_array_equal(found, stack.record(layer, int(expert)))
            num_kept += int(expert in right)
            assert int(stack.slots[layer][expert]) == slot
    np.testing.assert_array_equal(stack.ahead.told[:, :2].numpy(), expected)
    assert expected[:, 1].sum() >= 3
    assert num_kept >= 1


def test_imposed_lists_are_guessed_in_place_of_the_routers(arena: ExpertArena) -> None:
    stack = Stack(arena, 1, seed=3, rows=2)
    top_k = arena.geometry.top_k
    lists = torch.zeros((NUM_LAYERS, 4, top_k), dtype=torch.int64)
    for layer in range(NUM_LAYERS):
        lists[layer, :2] = torch.arange(layer, layer + top_k)
    stack.slots[1][1] = 5  # the first guess of layer 1 is in VRAM
    stack.ahead.impose(lists)
    for layer in range(2):
        picks = np.arange(2, 2 + top_k, dtype=np.int64)[None].repeat(2, axis=0)
        stack.run_layer(layer, stack.draw(), picks)
    assert stack.ahead.told[:2, :2].tolist() == [[0, 0], [1, 1]]


def test_what_is_guessed_and_not_picked_changes_nothing_else(arena: ExpertArena) -> None:
    top_k = arena.geometry.top_k
    lists = torch.full((NUM_LAYERS, 4, top_k), 0, dtype=torch.int64)
    seen = []
    for num_ahead in (0, 1):
        stack = Stack(arena, num_ahead, seed=4, rows=1)
        stack.ahead.impose(lists)
        stack.offers = Offers(0, 0, 4, stack.offers.ring)
        picks = np.arange(1, 1 + top_k, dtype=np.int64)[None]
        found = [stack.run_layer(layer, stack.draw(), picks) for layer in range(3)]
        kept = [each.log_kept.tolist() for each in found]
        seen.append((kept, [each.counts.tolist() for each in found], [row.tolist() for row in stack.slots]))
        assert stack.ahead.told[:3, :2].tolist() == ([[0, 0], [1, 0], [1, 0]] if num_ahead else [[0, 0]] * 3)
    assert seen[0] == seen[1]


def run_all(
    arena: ExpertArena,
    num_ahead: int,
    limit: int = 4,
    *,
    runs_hits_first: bool = False,
    crosses: bool = False,
) -> Schedule:
    """Enqueue a step as it is captured: where a graph ends, main waits for everything but what crosses."""
    stack = Stack(arena, num_ahead, seed=1, rows=1, runs_hits_first=runs_hits_first, crosses=crosses)
    stack.ahead.limit(limit)
    with stack.ahead.captured():
        return run_layers(stack)


def run_layers(stack: Stack) -> Schedule:
    arena = stack.arena
    for layer in range(NUM_LAYERS):
        x = stack.draw()
        picks = list_guesses(stack.scores(layer, x), arena.geometry.top_k).astype(np.int64)
        stack.run_layer(layer, x, picks)
        if layer + 1 in CUTS or layer + 1 == NUM_LAYERS:  # a graph may end here
            schedule = stack.schedule
            sides = schedule.guesses.seen | schedule.fetches.seen | schedule.landings.seen
            sides |= schedule.shared.seen
            assert schedule.main.seen >= sides
    return stack.schedule


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("runs_hits_first", [False, True])
def test_everything_waits_for_what_it_reads_and_for_readers_of_what_it_writes(
    arena: ExpertArena, runs_hits_first: bool, crosses: bool
) -> None:
    before = run_all(arena, 2, runs_hits_first=runs_hits_first, crosses=crosses).before
    for layer in range(NUM_LAYERS):
        assert f"plan {layer}" in before[f"gather {layer}"]
        assert f"gather {layer}" in before[f"experts {layer}"]
        assert f"plan {layer}" in before[f"shared {layer}"]
        assert f"shared {layer}" in before[f"experts {layer}"]
        assert not before[f"shared {layer}"] & {f"gather {layer}", f"hits {layer}"}
        for earlier in range(layer):  # one landing for all layers
            assert f"experts {earlier}" in before[f"gather {layer}"]
    guessed = [layer for layer in range(NUM_LAYERS) if layer not in (CUTS[:1] if crosses else CUTS)]
    for name in ("guess", "order", "keep"):
        assert {int(work.split()[1]) for work in before if work.startswith(name)} == set(guessed)
    for layer in guessed:
        # the router's input and the residency row, which the main stream makes and frees, and changes
        assert layer < 2 or f"experts {layer - 2}" in before[f"guess {layer}"]
        assert f"plan {layer - 1}" not in before[f"guess {layer}"]  # it need not wait that long
        assert {f"guess {layer}", f"gather {layer - 1}"} <= before[f"order {layer}"]
        assert f"order {layer}" in before[f"plan {layer}"]
        assert f"plan {layer}" in before[f"keep {layer}"]
        assert f"keep {layer}" not in before[f"experts {layer}"]
        for earlier in range(layer % 2, layer - 1, 2):  # the same set of lists and buffers
            assert f"experts {earlier}" in before[f"order {layer}"]
            assert f"plan {earlier}" in before[f"guess {layer}"]
            if earlier in guessed:
                assert f"keep {earlier}" in before[f"order {layer}"]


def test_experts_in_vram_wait_for_no_copy_of_their_layer_and_the_others_for_them(arena: ExpertArena) -> None:
    before = run_all(arena, 1, runs_hits_first=True).before
    for layer in range(NUM_LAYERS):
        assert f"plan {layer}" in before[f"hits {layer}"]
        assert f"gather {layer}" not in before[f"hits {layer}"]
        assert f"hits {layer}" in before[f"experts {layer}"]  # they share the kernel's scratch
        assert f"hits {layer}" not in before[f"gather {layer}"]
    order = list(before)  # as enqueued: what most waits for first
    for layer in range(NUM_LAYERS):
        work = [f"{name} {layer}" for name in ("gather", "hits", "shared")]
        assert sorted(work, key=order.index) == work


def test_without_buffers_or_a_courier_nothing_is_guessed(arena: ExpertArena) -> None:
    without = Stack(arena, 2, seed=1, rows=1, has_courier=False)
    given_up = Stack(arena, 2, seed=1, rows=1)
    given_up.ahead.give_up()
    schedules = [run_all(arena, 0), run_all(arena, 2, limit=0), run_layers(without), run_layers(given_up)]
    for schedule in schedules:
        assert {work.split()[0] for work in schedule.before} == {"plan", "gather", "shared", "experts"}
    assert (without.ahead.num_ahead, given_up.ahead.num_ahead) == (0, 0)


def test_behind_a_latent_attention_as_many_are_fetched_unless_told_otherwise(arena: ExpertArena) -> None:
    for limits, expected in (
        ((3,), [0, 3, 3, 3, 3]),
        ((3, 1), [0, 3, 3, 1, 3]),
        ((1, 0), [0, 1, 1, 0, 1]),
        ((1, 5), [0, 1, 1, 4, 1]),
    ):
        stack = Stack(arena, 3, seed=2, rows=1, crosses=True)
        stack.ahead.limit(*limits)
        for layer in range(5):
            x = stack.draw()
            stack.run_layer(layer, x, list_guesses(stack.scores(layer, x), 4).astype(np.int64))
        assert stack.ahead.told[:5, 0].tolist() == expected


def test_a_limit_holds_for_each_layer(arena: ExpertArena) -> None:
    stack = Stack(arena, 3, seed=2, rows=1)
    stack.ahead.limit(2)
    for layer in range(3):
        x = stack.draw()
        stack.run_layer(layer, x, list_guesses(stack.scores(layer, x), 4).astype(np.int64))
    assert stack.ahead.told[:3, 0].tolist() == [0, 2, 2]
    stack.ahead.limit(0)
    assert not stack.ahead.told.any()  # or the last step's would be counted again and again


def test_all_that_was_guessed_comes_by_the_copy_engine_for_several_rows_too(arena: ExpertArena) -> None:
    stack = Stack(arena, 2, seed=1, rows=3, crosses=True)
    with stack.ahead.captured():
        run_layers(stack)  # checks every expert's bytes
    assert stack.engine.num_copies == 2 * (NUM_LAYERS - 1)


def test_a_step_of_several_rows_fetches_one_more_and_has_room_for_it(arena: ExpertArena) -> None:
    for num_ahead, expected in ((0, (0, 0)), (1, (1, 2)), (2, (2, 3)), (4, (4, 4))):
        stack = Stack(arena, num_ahead, seed=1, rows=3)
        for num_rows, num_fetched in zip((1, 3), expected, strict=True):
            stack.rows = num_rows
            stack.ahead.begin_step(num_rows)
            run_layers(stack)  # checks every expert's bytes
            assert stack.ahead.told[1, 0] == num_fetched
        stack.ahead.limit(0)
        stack.ahead.begin_step(3)
        run_layers(stack)
        assert not stack.ahead.told.any()


def test_behind_a_late_copy_nothing_is_ordered_until_the_gate_is_open(
    arena: ExpertArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(arena, 1, seed=1, rows=1)
    with monkeypatch.context() as patch:
        patch.setattr(look_ahead, "launch_await", functools.partial(launch_await, most_polls=20))
        stack.engine.hold()
        run_layers(stack)  # checks every expert's bytes
    told = stack.ahead.told[:, 0].tolist()
    assert told[1:3] == [1, 1]  # layer 2 was guessed before layer 1 had waited
    assert told[3:] == [0] * (NUM_LAYERS - 3)
    assert stack.courier is not None
    assert stack.courier.take_late()
    stack.engine.release()
    stack.courier.catch_up(stack.ahead.newest_order())
    stack.ahead.open_gate()
    run_layers(stack)
    assert stack.ahead.told[4, 0] == 1


def test_steps_that_may_not_fetch_guess_nothing(arena: ExpertArena) -> None:
    stack = Stack(arena, 2, seed=1, rows=1)
    stack.ahead.allow(0, 0)
    run_layers(stack)
    assert stack.ahead.told[:, 0].tolist() == [0] * NUM_LAYERS
    stack.ahead.allow(4, 4)
    run_layers(stack)
    assert stack.ahead.told[1, 0] == 2


def test_captured_steps_fetch_what_they_may_now_by_what_stands_in_front(arena: ExpertArena) -> None:
    stack = Stack(arena, 2, seed=1, rows=1, crosses=True)
    plain_layers = [layer for layer in range(1, NUM_LAYERS) if layer not in CUTS]
    for plain, across in ((1, 2), (0, 1), (4, 0)):
        stack.ahead.allow(plain, across)
        with stack.ahead.captured():
            run_layers(stack)  # checks every expert's bytes
        told = stack.ahead.told[:, 0].tolist()
        assert [told[layer] for layer in plain_layers] == [min(2, plain)] * len(plain_layers)
        assert [told[layer] for layer in CUTS[1:]] == [across] * len(CUTS[1:])


def test_a_courier_is_tried_out_before_it_is_trusted(arena: ExpertArena) -> None:
    stack = Stack(arena, 2, seed=1, rows=1)
    settled: list[bool] = []
    assert stack.courier is not None
    stack.ahead.try_out(stack.courier, lambda: settled.append(True), arena.records[0])
    assert settled == [True]
    assert stack.engine.num_copies == 1
    run_layers(stack)  # what was tried leaves no trace
    with pytest.raises(EngineError, match="differs from it"):
        stack.ahead.try_out(stack.courier, lambda: None, arena.records[1])
    stack.engine.drops_marks = True
    with pytest.raises(EngineError, match="did not write the number"):
        stack.ahead.try_out(stack.courier, lambda: None, arena.records[0])
    stack.engine.error = 801
    with pytest.raises(EngineError, match="error 801"):
        stack.ahead.try_out(stack.courier, lambda: None, arena.records[0])
