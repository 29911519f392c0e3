"""Memory of slots and of the host as torch's CPU build can hold it: chunks, addresses, registration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm53srv.errors import MachineError
from glm53srv.offload.device.gpu.registered import (
    MAPPED,
    PORTABLE,
    RegisteredMemory,
    device_alias,
    host_tensor,
)
from glm53srv.offload.device.gpu.slot_chunks import SlotChunks
from glm53srv.offload.device.region import Region

RECORD = 512


def chunks(num_slots: int = 12, chunk_slots: int = 4) -> SlotChunks:
    return SlotChunks(num_slots, chunk_slots, RECORD, torch.device("cpu"))


@pytest.mark.parametrize("num_slots", [1, 4, 11, 12])
def test_slots_lie_where_their_addresses_say_and_apart(num_slots: int) -> None:
    memory = chunks(num_slots)
    addresses = memory.addresses()
    assert addresses.dtype == np.int64
    assert [memory.slot(slot).data_ptr() for slot in range(num_slots)] == addresses.tolist()
    assert all(memory.slot(slot).shape == (RECORD,) for slot in range(num_slots))
    assert (np.diff(np.sort(addresses)) >= RECORD).all()
    assert memory.num_bytes == num_slots * RECORD


def test_neighbours_of_a_chunk_are_one_view() -> None:
    memory = chunks()
    run = memory.slots(5, 3)
    assert run.shape == (3, RECORD)
    assert [row.data_ptr() for row in run] == memory.addresses()[5:8].tolist()


def test_lent_chunks_have_no_memory_and_no_address() -> None:
    memory = chunks()
    before = memory.addresses()
    memory.slot(3).fill_(7)
    memory.free(range(4, 12))
    assert memory.num_bytes == 4 * RECORD
    assert [memory.has_memory(slot) for slot in (3, 4, 11)] == [True, False, False]
    assert memory.addresses().tolist() == [*before[:4].tolist(), *[0] * 8]
    assert int(memory.slot(3)[0]) == 7
    with pytest.raises(RuntimeError, match="slot 4 has no memory"):
        memory.slot(4)


def test_a_chunk_that_is_lent_in_part_stays() -> None:
    memory = chunks()
    memory.free(range(3, 11))
    assert [memory.has_memory(slot) for slot in (0, 3, 4, 7, 8, 11)] == [True, True, False, False, True, True]


def test_the_end_of_a_short_last_chunk_is_the_end_of_the_slots() -> None:
    memory = chunks(10)
    memory.free(range(8, 10))
    assert memory.num_bytes == 8 * RECORD
    memory.allocate(range(8, 10))
    assert memory.slot(9).shape == (RECORD,)


def test_memory_is_taken_back_and_the_rest_is_not_touched() -> None:
    memory = chunks()
    memory.slot(0).fill_(1)
    memory.free(range(4, 12))
    memory.allocate(range(8, 12))
    assert [memory.has_memory(slot) for slot in (0, 4, 8, 11)] == [True, False, True, True]
    memory.allocate(range(12))
    assert memory.num_bytes == 12 * RECORD
    assert bool((memory.slot(0) == 1).all())
    memory.free_all()
    assert memory.num_bytes == 0
    assert not memory.addresses().any()


class Driver:
    """What the package's extension does of this, noted. refusal: the driver says no."""

    def __init__(self, refusal: str = "") -> None:
        self.calls: list[tuple[object, ...]] = []
        self._refusal = refusal

    def cuda_host_register(self, address: int, num_bytes: int, flags: int) -> None:
        if self._refusal:
            raise RuntimeError(self._refusal)
        self.calls.append(("register", address, num_bytes, flags))

    def cuda_host_unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))

    def pinned_cuda_view(self, source: torch.Tensor, device: int) -> torch.Tensor:
        self.calls.append(("view", device))
        return source


def test_memory_is_registered_mapped_and_given_back_once() -> None:
    driver, region = Driver(), Region(8192)
    memory = RegisteredMemory(driver)
    memory.pin(region)
    memory.release()
    memory.release()
    assert driver.calls == [
        ("register", region.address, 8192, PORTABLE | MAPPED),
        ("unregister", region.address),
    ]


def test_a_refusal_is_one_line_with_the_remedy_and_leaves_nothing_to_give_back() -> None:
    driver = Driver("out of memory\nCUDA kernel errors might be reported later")
    memory = RegisteredMemory(driver)
    with pytest.raises(MachineError, match=r"\(out of memory\); the lock limit is .*ulimit -l") as caught:
        memory.pin(Region(8192))
    assert "\n" not in str(caught.value)
    memory.release()
    assert driver.calls == []


def test_an_alias_is_the_regions_bytes() -> None:
    driver, region = Driver(), Region(4096)
    alias = device_alias(driver, region, torch.device("cuda", 3))
    assert driver.calls == [("view", 3)]
    host_tensor(region)[17] = 9
    assert (int(alias[17]), int(region.array()[17]), alias.numel()) == (9, 9, 4096)
