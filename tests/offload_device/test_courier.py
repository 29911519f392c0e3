"""The courier: every order once and in turn, whatever wakes it, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from glm53srv.errors import EngineError
from glm53srv.offload.device.courier import CELL_BYTES, MOST_COPIES, Courier
from tests.offload_device.copy_engine import CONTEXT, STREAM, CopyEngine

RECORD, CELLS = 96, 4


class Office:
    """A courier between pinned records and buffers on a card, and a kernel that posts."""

    def __init__(self, first_seq: int = 1, poll_us: int = 2000) -> None:
        self.engine = CopyEngine()
        self.records = np.random.default_rng(3).integers(0, 256, (16, RECORD), np.uint8)
        self.buffers = np.zeros((MOST_COPIES, RECORD), np.uint8)
        self.arrived = np.full(1, first_seq - 1 & 0xFFFFFFFF, np.uint32)
        self.courier = Courier(CELLS, first_seq)
        self.seq = first_seq
        self.courier.start(self.engine.calls(), RECORD, STREAM, self.arrived.ctypes.data, poll_us)

    def post(self, records: list[int]) -> int:
        """Write an order as a kernel does, its number last."""
        seq, self.seq = self.seq & 0xFFFFFFFF, self.seq + 1
        cell = self.courier.region.array()[seq % CELLS * CELL_BYTES :][:CELL_BYTES]
        longs, words = cell.view(np.uint64), cell.view(np.uint32)
        for index, record in enumerate(records[:MOST_COPIES]):
            longs[1 + index] = self.records[record].ctypes.data
            longs[5 + index] = self.buffers[index].ctypes.data
        words[1] = len(records)
        words[0] = seq
        return seq

    def wait(self, seq: int) -> None:
        """Poll as a kernel does."""
        end = time.monotonic() + 10
        while self.arrived[0] != seq:
            assert time.monotonic() < end, (self.arrived[0], seq)
            time.sleep(0.0002)

    def wait_until_parked(self) -> None:
        """Until it parks from now on: one that has parked wakes to look, and parks again."""
        end, num_parks = time.monotonic() + 10, self.courier.stats().num_parks
        while self.courier.stats().num_parks == num_parks:
            assert time.monotonic() < end, num_parks
            time.sleep(0.0002)


@pytest.fixture
def office() -> Iterator[Office]:
    made = Office()
    yield made
    made.courier.close()


@pytest.mark.parametrize("first_seq", [1, 2**32 - 3])
def test_orders_are_served_in_turn_over_many_laps(first_seq: int) -> None:
    office = Office(first_seq)
    try:
        posted = []
        for number in range(25):
            chosen = [(number * 5 + index) % 16 for index in range(number % (MOST_COPIES + 1))]
            seq = office.post(chosen)
            office.wait(seq)
            posted.append(seq)
            np.testing.assert_array_equal(office.buffers[: len(chosen)], office.records[chosen])
        assert office.engine.marks == posted
        office.courier.check()
        stats = office.courier.stats()
        assert (stats.num_orders, stats.num_copies) == (25, sum(number % 5 for number in range(25)))
        assert office.engine.contexts == [CONTEXT]
    finally:
        office.courier.close()
    office.courier.close()


def test_a_parked_courier_wakes_by_its_bell_and_by_itself() -> None:
    office = Office(poll_us=0)
    try:
        office.wait_until_parked()
        office.courier.ring()
        office.wait(office.post([3]))
        office.wait_until_parked()
        begin = time.monotonic()
        office.wait(office.post([4]))  # nobody rings
        assert time.monotonic() - begin < 5
    finally:
        office.courier.close()


@pytest.mark.parametrize("first_seq", [1, 2**32 - 2])
def test_it_catches_up_with_orders_that_it_has_not_looked_at(first_seq: int) -> None:
    office = Office(first_seq, poll_us=0)
    try:
        office.wait_until_parked()
        newest = [office.post([record]) for record in (5, 6, 7)][-1]
        signed = newest - (1 << 32 if newest >> 31 else 0)  # as int32 on the device has it
        office.courier.catch_up(signed)
        assert office.engine.num_copies == 3
        office.courier.catch_up(signed)  # nothing new
        np.testing.assert_array_equal(office.buffers[0], office.records[7])
    finally:
        office.courier.close()


def test_one_that_does_not_catch_up_is_an_error(office: Office) -> None:
    office.engine.hold()
    try:
        with pytest.raises(EngineError, match="did not come within 0 s"):
            office.courier.catch_up(office.post([1]), timeout_s=0.05)
    finally:
        office.engine.release()


def test_a_refusal_is_said_while_it_is_waited_for(office: Office) -> None:
    office.engine.error = 700
    newest = [office.post([1]), office.post([2])][-1]
    with pytest.raises(EngineError, match="error 700"):
        office.courier.catch_up(newest)


def test_an_error_of_the_driver_ends_it_and_is_said(office: Office) -> None:
    office.wait(office.post([1]))
    office.engine.error = 700
    office.post([2])
    end = time.monotonic() + 10
    while office.courier.stats().num_orders < 2:
        assert time.monotonic() < end
        time.sleep(0.001)
    with pytest.raises(EngineError, match="error 700"):
        office.courier.check()
    assert office.arrived[0] == 1  # what did not come is not said to have come


def test_an_order_that_cannot_be_is_refused(office: Office) -> None:
    office.post([1] * (MOST_COPIES + 1))
    end = time.monotonic() + 10
    while not office.courier.stats().num_orders:
        assert time.monotonic() < end
        time.sleep(0.001)
    with pytest.raises(EngineError, match="error -1"):
        office.courier.check()
    assert office.engine.num_copies == 0


def test_who_did_not_wait_is_told_of_once(office: Office) -> None:
    late = office.courier.region.array()[CELLS * CELL_BYTES :].view(np.int32)
    assert office.courier.late_address == late.ctypes.data
    assert not office.courier.take_late()
    late[0] = 1
    assert office.courier.take_late()
    assert not office.courier.take_late()


def test_a_ring_of_an_odd_size_is_refused_and_nothing_runs_before_start() -> None:
    with pytest.raises(ValueError, match="ring of 6 cells"):
        Courier(6)
    courier = Courier(8)
    with pytest.raises(ValueError, match="does not run"):
        courier.ring()
    courier.close()
