"""Memory behind addresses that stay, over a driver that needs no GPU."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from glm53srv.errors import MachineError
from glm53srv.offload.device.gpu.device_blocks import DriverBlocks
from glm53srv.offload.device.gpu.page_memory import PageMemory
from tests.offload_device.gpu.fake_blocks import BLOCK, FakeBlocks

PAGES = 40
SHAPES = ((256, 3), (5,), (2, 700))
"""Of a page of three tensors: pages of the second lie by the hundred in a block, the third's are larger."""


def make(source: FakeBlocks, num_pages: int) -> tuple[PageMemory, list[torch.Tensor]]:
    memory = PageMemory(source, PAGES, num_pages)
    return memory, [memory.tensor(shape, torch.float16) for shape in SHAPES]


def test_tensors_have_all_pages_and_zeroed_memory_for_the_first() -> None:
    source = FakeBlocks()
    memory, tensors = make(source, 7)
    assert [tuple(tensor.shape) for tensor in tensors] == [(PAGES, *shape) for shape in SHAPES]
    for tensor in tensors:
        assert not tensor[:7].any()
    assert memory.num_bytes == source.num_mapped * BLOCK == memory.bytes_for(7)
    assert memory.bytes_for(7) < memory.bytes_for(PAGES)


def test_pages_keep_what_they_hold_while_others_come_and_go() -> None:
    source = FakeBlocks()
    memory, tensors = make(source, 3)
    addresses = [tensor.data_ptr() for tensor in tensors]
    drawn = random.Random(3)
    written: dict[int, int] = {}
    for step in range(60):
        count = drawn.randint(1, PAGES)
        memory.resize(count)
        assert memory.num_pages == count
        assert source.num_mapped * BLOCK == memory.num_bytes == memory.bytes_for(count)
        written = {page: value for page, value in written.items() if page < count}
        for tensor in tensors:
            for page, value in written.items():
                assert (tensor[page] == value).all()
            assert source.is_mapped(tensor[:count])
        page = drawn.randrange(count)
        written[page] = step
        for tensor in tensors:
            tensor[page] = step
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_memory_that_comes_is_zero_though_others_have_used_it() -> None:
    source = FakeBlocks()
    memory, tensors = make(source, PAGES)
    for tensor in tensors:
        tensor.fill_(3)
    memory.resize(1)
    memory.resize(PAGES)
    largest = tensors[2]  # a page of it is more than a block, so none is left of the others
    assert not largest[2:].any()


def test_pages_within_is_the_inverse_of_bytes_for() -> None:
    memory, _ = make(FakeBlocks(), 1)
    for count in range(1, PAGES + 1):
        held = memory.pages_within(memory.bytes_for(count))
        assert held >= count
        assert memory.bytes_for(held) == memory.bytes_for(count)
        assert memory.pages_within(memory.bytes_for(count) - 1) < count
    assert memory.pages_within(0) == 0


@pytest.mark.parametrize("left", range(12))
def test_a_card_without_room_changes_nothing(left: int) -> None:
    source = FakeBlocks()
    memory, tensors = make(source, 2)
    tensors[0][1] = 7
    before = source.num_mapped
    source.most_blocks = before + left
    assert memory.bytes_for(PAGES) > source.most_blocks * BLOCK
    with pytest.raises(torch.OutOfMemoryError):
        memory.resize(PAGES)
    assert (source.num_mapped, memory.num_pages) == (before, 2)
    assert (tensors[0][1] == 7).all()


def test_close_gives_back_memory_and_addresses_once() -> None:
    source = FakeBlocks()
    memory, tensors = make(source, 9)
    tensors.clear()
    memory.close()
    memory.close()
    assert (source.num_mapped, source.num_reserved) == (0, 0)


@pytest.mark.parametrize("count", [0, PAGES + 1])
def test_a_number_of_pages_that_there_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"memory for {count} of {PAGES}"):
        PageMemory(FakeBlocks(), PAGES, count)
    memory, _ = make(FakeBlocks(), 3)
    with pytest.raises(ValueError, match=f"memory for {count} of {PAGES}"):
        memory.resize(count)


class Driver:
    """Calls of the driver, noted; some of them fail. Handles and mappings are counted."""

    def __init__(self, fails: str = "", at: int = 1, status: int = 2) -> None:
        self.calls: list[str] = []
        self.handles, self.mapped = 0, set[int]()
        self._fails, self._at, self._status = fails, at, status

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem") or (name == self._fails and self._at == 0):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._fails and self.calls.count(name) == self._at:
                return self._status
            if name == "cuMemGetAllocationGranularity":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_size_t))[0] = BLOCK
            elif name == "cuMemAddressReserve":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_ulonglong))[0] = 16 * BLOCK
            elif name == "cuMemCreate":
                self.handles += 1
            elif name == "cuMemRelease":
                self.handles -= 1
            elif name == "cuMemMap":
                self.mapped.add(arguments[0].value)
            elif name == "cuMemUnmap":
                self.mapped.remove(arguments[0].value)
            return 0

        return call


def test_blocks_are_mapped_one_by_one_and_made_accessible_together() -> None:
    driver = Driver()
    blocks = DriverBlocks(torch.device("cuda", 0), driver)
    address = blocks.reserve(4 * BLOCK)
    blocks.map(address + BLOCK, 3 * BLOCK)
    assert driver.mapped == {address + place * BLOCK for place in (1, 2, 3)}
    assert driver.handles == 0
    assert driver.calls.count("cuMemSetAccess") == 1
    blocks.unmap(address + 2 * BLOCK, 2 * BLOCK)
    assert driver.mapped == {address + BLOCK}


@pytest.mark.parametrize("fails", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(("status", "expected"), [(2, torch.OutOfMemoryError), (719, MachineError)])
def test_what_fails_halfway_leaves_nothing_mapped(
    fails: str, at: int, status: int, expected: type[Exception]
) -> None:
    at = 1 if fails == "cuMemSetAccess" else at
    driver = Driver(fails, at, status)
    blocks = DriverBlocks(torch.device("cuda", 0), driver)
    address = blocks.reserve(4 * BLOCK)
    with pytest.raises(expected, match=fails):
        blocks.map(address, 4 * BLOCK)
    assert (driver.mapped, driver.handles) == (set(), 0)


def test_a_driver_without_such_memory_is_told_of() -> None:
    with pytest.raises(MachineError, match="the driver has no cuMemGetAllocationGranularity"):
        DriverBlocks(torch.device("cuda", 0), Driver("cuMemGetAllocationGranularity", at=0))
    refusing = DriverBlocks(torch.device("cuda", 0), Driver("cuMemMap", status=801))
    with pytest.raises(MachineError, match="cuMemMap: the driver's error 801"):
        refusing.try_out()
