"""Staging: two buffers, one layer ahead, nothing out of order."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.offload.staging import BufferState, StageCopy, StagingSchedule, should_stage, stage_layer


def run_layer(schedule: StagingSchedule, layer: int) -> tuple[StageCopy, ...]:
    schedule.landed(layer)
    schedule.begin_layer(layer)
    return schedule.end_layer(layer)


def test_a_chunk_stages_each_layer_once_two_buffers_in_turn() -> None:
    schedule = StagingSchedule(5)
    issued = list(schedule.start())
    for layer in range(5):
        issued += run_layer(schedule, layer)
    assert issued == [StageCopy(layer, layer % 2) for layer in range(5)]
    assert schedule.is_done


def test_the_next_layer_travels_while_this_one_computes() -> None:
    schedule = StagingSchedule(4)
    schedule.start()
    run_layer(schedule, 0)
    schedule.landed(1)
    schedule.begin_layer(1)
    assert schedule.state(0) == (BufferState.COPYING, 2)
    assert schedule.state(1) == (BufferState.IN_USE, 1)


def test_a_single_layer_uses_one_buffer() -> None:
    schedule = StagingSchedule(1)
    assert schedule.start() == (StageCopy(0, 0),)
    assert run_layer(schedule, 0) == ()
    assert schedule.is_done


@pytest.mark.parametrize(
    "misuse",
    [
        lambda s: s.start(),  # twice
        lambda s: s.begin_layer(0),  # copies have not landed
        lambda s: s.begin_layer(1),  # not the next
        lambda s: s.end_layer(0),  # has not begun
        lambda s: s.landed(2),  # not issued
        lambda s: (s.landed(0), s.landed(0)),
        lambda s: (s.landed(1), s.begin_layer(1)),
    ],
)
def test_events_out_of_order_are_refused(misuse: object) -> None:
    schedule = StagingSchedule(4)
    schedule.start()
    assert callable(misuse)
    with pytest.raises(ValueError):
        misuse(schedule)


def test_an_aborted_chunk_names_the_copies_to_wait_for() -> None:
    schedule = StagingSchedule(4)
    schedule.start()
    schedule.landed(0)
    assert schedule.abort() == (1,)
    assert schedule.is_done
    assert schedule.state(0) == schedule.state(1) == (BufferState.EMPTY, None)


def test_random_orders_of_landing_never_break_the_buffers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_layers = int(rng.integers(1, 12))
        schedule = StagingSchedule(num_layers)
        copying = [copy.layer for copy in schedule.start()]
        ready: set[int] = set()
        while not schedule.is_done:
            if copying and rng.random() < 0.5:
                layer = copying.pop(int(rng.integers(len(copying))))
                schedule.landed(layer)
                ready.add(layer)
            if schedule.next_layer in ready:
                layer = schedule.next_layer
                schedule.begin_layer(layer)
                in_buffers = [schedule.state(buffer)[1] for buffer in range(2)]
                assert in_buffers.count(layer) == 1
                copying += [copy.layer for copy in schedule.end_layer(layer)]
        assert not copying


def test_a_buffer_takes_the_hottest_of_what_is_not_resident_in_the_order_of_home() -> None:
    table = np.array([-1, 7, -1, -1, 3, -1], np.int32)
    heat = np.array([5, 99, 9, 5, 99, 0], np.int32)
    staged = stage_layer(2, table, heat, first_slot=40, num_slots=3)
    assert staged.keys.tolist() == [2 * 6 + 0, 2 * 6 + 2, 2 * 6 + 3]
    assert staged.slots.tolist() == [40, 41, 42]


def test_only_long_chunks_are_staged() -> None:
    assert not should_stage(96, 8)
    assert should_stage(512, 8)
