"""Orders to the copy engine and waits for them, the kernels under the interpreter, the courier at work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.gpu.launch import make_landing
from glm53srv.offload.device.gpu.order_kernel import launch_await, launch_order, make_order_ring
from tests.offload_device.copy_engine import STREAM, CopyEngine

RECORD, CELLS, BUFFERS = 4096 * 8 + 48, 8, 3


class Office:
    """A courier, the kernels' view of its ring, and two sets of buffers."""

    def __init__(self, first_seq: int) -> None:
        self.engine = CopyEngine()
        self.records = np.random.default_rng(7).integers(0, 256, (12, RECORD), np.uint8)
        self.courier = Courier(CELLS, first_seq)
        self.gate = torch.tensor([4, 0, 4], dtype=torch.int32)
        self.ring = make_order_ring(self.courier, 2, self.gate, torch.device("cpu"))
        self.buffers = [torch.zeros((BUFFERS, RECORD), dtype=torch.uint8) for _ in range(2)]
        self.landings = [make_landing(buffers) for buffers in self.buffers]
        arrived = int(self.ring.arrived.data_ptr())
        self.courier.start(self.engine.calls(), RECORD, STREAM, arrived)

    def order(self, turn: int, records: list[int]) -> None:
        landing = self.landings[turn]
        landing.count.fill_(len(records))
        for index, record in enumerate(records):
            landing.sources[index] = self.records[record].ctypes.data
            landing.targets[index] = self.buffers[turn][index].data_ptr()
        launch_order(landing, self.ring, turn)

    def arrive(self, turn: int, most_polls: int = 100_000) -> None:
        launch_await(self.landings[turn], self.ring, turn, RECORD, most_polls)

    def check(self, turn: int, records: list[int]) -> None:
        np.testing.assert_array_equal(self.buffers[turn][: len(records)].numpy(), self.records[records])


@pytest.fixture(params=[1, 2**31 - 2, 2**32 - 2])
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    made = Office(request.param)
    yield made
    made.engine.release()
    made.courier.close()


def test_what_was_ordered_is_there_behind_the_wait(office: Office) -> None:
    chosen: dict[int, list[int]] = {}
    for layer in range(3 * CELLS):
        turn = layer % 2
        chosen[turn] = [(layer * 5 + index) % 12 for index in range(layer % (BUFFERS + 1))]
        office.order(turn, chosen[turn])
        if layer:  # the one before, while this one is on its way
            office.arrive(1 - turn)
            office.check(1 - turn, chosen[1 - turn])
    assert not office.courier.take_late()
    assert office.gate.tolist() == [4, 0, 4]
    office.courier.check()


def test_nothing_to_copy_is_no_order(office: Office) -> None:
    office.order(0, [])
    office.arrive(0, most_polls=0)
    assert office.courier.stats().num_orders == 0
    assert not office.courier.take_late()


def test_who_waits_too_long_copies_by_himself_and_closes_the_gate(office: Office) -> None:
    office.engine.hold()
    office.order(1, [4, 9])
    office.arrive(1, most_polls=3)
    office.check(1, [4, 9])
    assert office.gate.tolist() == [4, 1, 4]
    assert office.courier.take_late()
    office.engine.release()
    office.arrive(1)  # the ordered copies come in the end, with the same bytes
    office.check(1, [4, 9])


def test_a_layer_without_an_order_does_not_wait_for_another_one_s(office: Office) -> None:
    office.engine.hold()
    office.order(0, [3])
    office.order(1, [])
    office.arrive(1, most_polls=0)
    assert office.gate.tolist() == [4, 0, 4]
    assert not office.courier.take_late()
