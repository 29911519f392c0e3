"""The GPU's offload as a whole, its kernels under Triton's interpreter, its workers at work: what its layers
add up to equals the experts in place, whatever lies in slots, travels, is shared or was guessed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from glm53srv.errors import EngineError, MachineError
from glm53srv.kernels import KernelPool
from glm53srv.model.checkpoint import CodebookName
from glm53srv.offload.cost import CostOverrides, Mode
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.gpu import gpu_offload, look_ahead
from glm53srv.offload.device.gpu.cpu_lane import HAND_OVER_MS, MAX_HAND_OVER_MS
from glm53srv.offload.device.gpu.host_log import LaneTimes, StepLog
from glm53srv.offload.device.gpu.order_kernel import launch_await
from glm53srv.offload.device.layout import RecordLayout
from tests.offload_device.builders import random_arena
from tests.offload_device.copy_engine import CopyEngine
from tests.offload_device.gpu import fake_cuda
from tests.offload_device.gpu.card import EXPERTS, HIDDEN, LAYERS, MAX_ROWS, SLOTS, TOP_K, Card


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)


@pytest.fixture(scope="module")
def experts() -> ExpertArena:
    layout = RecordLayout(HIDDEN, 256, (48, 48, 48), CodebookName.MUL1)
    return random_arena(layout, LAYERS, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def pool() -> Iterator[KernelPool]:
    with KernelPool(1) as made:
        yield made


NUM_TRIED = 1
"""Copies by which a courier is tried out at start."""


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyEngine]:
    """A copy engine for couriers."""
    made = CopyEngine()
    monkeypatch.setattr(gpu_offload, "find_driver_calls", made.calls)
    yield made
    made.release()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_experts_come_by_the_copy_engine_in_both_modes_and_for_several_rows(
    experts: ExpertArena, pool: KernelPool, engine: CopyEngine, mode: Mode
) -> None:
    card = Card(experts, pool, mode)
    offload = card.offload
    try:
        for step in range(10):
            card.decode(rows=(1, 3, 1, 2)[step % 4])
            if step == 4:
                card.prefill(40)
        card.check_slots()
        counts = offload.counts.frozen()
    finally:
        offload.close()
    read = np.sum(card.guesses[:-1], axis=0).tolist()
    assert [counts.num_guessed, counts.num_guessed_right] == read
    assert counts.num_guessed_right > 5
    if mode == "fast":  # in exact mode here the first layer takes all offers
        assert card.num_kept_ahead > 0
    assert engine.num_copies == NUM_TRIED + sum(fetched for fetched, _ in card.guesses)


def test_a_step_that_is_not_captured_orders_nothing(
    experts: ExpertArena, pool: KernelPool, engine: CopyEngine
) -> None:
    card = Card(experts, pool, "fast")
    try:
        card.is_captured = False
        card.decode(1)
        assert engine.num_copies == NUM_TRIED
        card.is_captured = True
        card.decode(1)
        assert engine.num_copies > NUM_TRIED
    finally:
        card.offload.close()


def test_while_slots_are_filled_nothing_is_fetched_ahead(
    experts: ExpertArena, pool: KernelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_offload, "FEW_COPIES", 0)
    card = Card(experts, pool, "fast")  # it copies one expert a step while there are free slots
    try:
        copied = [0]
        for _ in range(30):
            card.decode(1)
            copied.append(card.offload.counts.num_copies)
    finally:
        card.offload.close()
    was_filling = [now > before for before, now in itertools.pairwise(copied)]
    for is_behind_copies, (num_fetched, _) in zip([False, *was_filling], card.guesses, strict=False):
        assert not (is_behind_copies and num_fetched)
    assert any(was_filling)
    assert any(num_fetched for num_fetched, _ in card.guesses[1:])


def test_a_copy_engine_that_is_late_costs_no_step_its_sums_and_is_used_again(
    experts: ExpertArena,
    pool: KernelPool,
    engine: CopyEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(look_ahead, "launch_await", functools.partial(launch_await, most_polls=50))
    catch_up = Courier.catch_up

    def release_and_catch_up(courier: Courier, newest: int) -> None:
        engine.release()
        catch_up(courier, newest)
        posted.append((newest, courier.stats().num_orders))

    posted: list[tuple[int, int]] = []
    card = Card(experts, pool, "fast")
    monkeypatch.setattr(Courier, "catch_up", release_and_catch_up)
    try:
        engine.hold()
        card.decode(1)  # checks its sums
        assert [record.levelname for record in caplog.records if "late" in record.message] == ["WARNING"]
        [(newest, num_handed)] = posted
        assert card.offload.courier is not None
        assert newest - card.offload.courier.first_seq + 1 == num_handed > 0
        num_before = engine.num_copies
        monkeypatch.setattr(look_ahead, "launch_await", launch_await)
        for _ in range(3):
            card.decode(1)
        assert engine.num_copies > num_before + 4
        card.check_slots()
    finally:
        engine.release()
        card.offload.close()


def test_a_driver_that_refuses_fails_the_step(
    experts: ExpertArena, pool: KernelPool, engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ahead, "launch_await", functools.partial(launch_await, most_polls=50))
    card = Card(experts, pool, "fast")
    try:
        engine.error = 719

        def decode() -> None:  # a step copies by itself what does not come
            for _ in range(20):
                card.decode(1)

        with pytest.raises(EngineError, match="error 719"):
            decode()
    finally:
        card.offload.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_layers_add_up_whatever_lane_serves_their_experts(
    experts: ExpertArena, pool: KernelPool, mode: Mode
) -> None:
    card = Card(experts, pool, mode)
    offload = card.offload
    try:
        for step in range(14):
            card.decode(rows=(1, 1, 3, 1, 2)[step % 5])
            if step in (2, 4):
                card.prefill(40)
        assert card.check_slots() > 10
        num_bytes = offload.store.num_bytes
        card.prefill(100, is_more_waiting=True)
        assert offload.policy.capacity < SLOTS
        card.prefill(100)
        assert offload.policy.capacity == SLOTS
        card.decode(1)
        card.check_slots()
        counts = offload.counts.frozen()
    finally:
        offload.close()
    assert card.least_bytes < num_bytes
    assert counts.num_steps == 15
    assert counts.num_vram > 30
    assert counts.num_link > 30
    assert counts.num_kept > 5
    assert counts.num_copies > 0
    assert counts.num_staged > 0
    assert counts.num_loans > 0
    read = np.sum(card.guesses[:-1], axis=0).tolist()  # the last step's log is still on its way
    assert [counts.num_guessed, counts.num_guessed_right] == read
    assert counts.num_guessed_right > 0
    if mode == "fast":
        assert counts.num_cpu > 20
        assert counts.num_split > 0
        assert card.num_kept_ahead > 0
    else:
        assert (counts.num_cpu, counts.num_split) == (0, 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "setting", ["one launch", "no look-ahead", "in place", "whole experts", "new workers", "added lanes"]
)
def test_settings_for_measurements_change_no_sums(
    experts: ExpertArena, pool: KernelPool, setting: str
) -> None:
    card = Card(experts, pool, "fast", landing=0 if setting == "in place" else 16)
    offload = card.offload
    try:
        if setting == "one launch":
            offload.layers.split_launches(False)
        elif setting == "no look-ahead":
            offload.look_ahead.limit(0)
        elif setting == "whole experts":
            offload.share_experts(False)
        for step in range(5):
            if setting in ("new workers", "added lanes") and step == 2:
                offload.counts_overlap = setting == "new workers"
                offload.change_lane(card.hire, CostOverrides(0.0, 0.01, 1.0))
            card.decode(rows=1 + step % 2)
        counts = offload.counts.frozen()
        report = offload.report
        card.check_slots()
    finally:
        offload.close()
    assert counts.num_cpu > 0
    assert report is not None
    assert report.costs.now.is_overlapped == (setting not in ("in place", "added lanes"))
    if setting == "no look-ahead":
        assert counts.num_guessed == 0
    if setting in ("whole experts", "in place"):
        assert counts.num_split == 0


def test_what_the_device_waited_for_tells_the_hand_over(
    experts: ExpertArena, pool: KernelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter has no clock of the device: stamps are made up."""

    def read_stamps(log: StepLog, num_blocks: int) -> LaneTimes:
        count = len(log.counts)
        return LaneTimes([], np.zeros(count), np.full(count, 1e6), np.full(count, np.nan))

    card = Card(experts, pool, "fast")
    try:
        card.decode(1)
        monkeypatch.setattr(gpu_offload, "read_stamps", read_stamps)
        for _ in range(4):
            card.decode(1)
        lane = card.offload.lane
        assert lane is not None
        assert HAND_OVER_MS < lane.hand_over.value_ms < MAX_HAND_OVER_MS
    finally:
        card.offload.close()


def test_steps_fetch_what_the_gaps_of_captured_ones_hold(
    experts: ExpertArena, pool: KernelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter has no clock of the device: stamps are made up."""
    card = Card(experts, pool, "fast")
    gap_ms = [0.0]

    def read_stamps(log: StepLog, num_blocks: int) -> LaneTimes:
        count = len(log.counts)
        return LaneTimes([], np.zeros(count), np.full(count, np.nan), np.full(count, gap_ms[0]))

    def fetched(num_steps: int) -> int:
        card.guesses.clear()
        for _ in range(num_steps):
            card.decode(1)  # checks its sums
        return sum(num_fetched for num_fetched, _ in card.guesses)

    try:
        for _ in range(8):  # until no step fills the cache
            card.decode(1)
        assert fetched(4) > 0
        card.is_captured = False
        fetched(2)
        monkeypatch.setattr(gpu_offload, "read_stamps", read_stamps)
        fetched(2)
        card.is_captured = True
        assert fetched(1) > 0  # only steps were read that waited for the host
        fetched(2)
        assert fetched(4) == 0
        gap_ms[0] = 1e6
        fetched(2)
        assert fetched(4) > 0
        card.offload.tunes_ahead, gap_ms[0] = False, -1e9
        fetched(2)
        assert fetched(4) > 0
    finally:
        card.offload.close()


@pytest.mark.parametrize("fault", ["refuses", "drops marks", "no driver"])
def test_without_a_driver_that_can_nothing_is_fetched_ahead_and_it_is_said(
    experts: ExpertArena,
    pool: KernelPool,
    engine: CopyEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    def no_driver() -> None:
        raise MachineError("the driver lacks what copies by the copy engine need: cuStreamWriteValue32_v2")

    engine.error = 801 if fault == "refuses" else 0
    engine.drops_marks = fault == "drops marks"
    if fault == "no driver":
        monkeypatch.setattr(gpu_offload, "find_driver_calls", no_driver)
    card = Card(experts, pool, "fast")
    try:
        said = {"refuses": "error 801", "drops marks": "did not write", "no driver": "the driver lacks"}
        (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert record.getMessage().startswith("no experts are fetched ahead of their layer: ")
        assert said[fault] in record.getMessage()
        assert card.offload.courier is None
        num_tried = engine.num_copies
        for rows in (1, 2):
            card.decode(rows)  # checks its sums
        assert card.guesses == [[0, 0], [0, 0]]
        assert engine.num_copies == num_tried
    finally:
        card.offload.close()


def test_a_step_of_too_many_rows_is_refused(experts: ExpertArena, pool: KernelPool) -> None:
    card = Card(experts, pool, "exact")
    try:
        with pytest.raises(EngineError, match="a decode step of 5 rows, the offload has 4"):
            card.offload.begin_decode(MAX_ROWS + 1, is_captured=False)
    finally:
        card.offload.close()
