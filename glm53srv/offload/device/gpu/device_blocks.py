"""Memory of the device that comes and goes under addresses that stay: the driver's virtual memory management.

    reserve      addresses without memory
    map, unmap   a block of memory behind a part of them, or none again

The calls and their structures are those of cuda.h (CUDA 10.2 and later). What is mapped here is none of
torch's allocator: its limits do not count it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

from glm53srv.errors import MachineError

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_MINIMUM = 0
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM."""
_OUT_OF_MEMORY = 2


class BlockSource(Protocol):
    """Where blocks come from. Engine thread only; the caller sees to it that nobody uses what is unmapped.

    block_bytes: size of a block, of which addresses and lengths below are multiples.
    """

    block_bytes: int

    def reserve(self, num_bytes: int) -> int:
        """Give the first of so many addresses. Raises MachineError."""

    def map(self, address: int, num_bytes: int) -> None:
        """Put memory behind addresses; nothing is known of its content. Raises torch.OutOfMemoryError, and
        has mapped nothing then."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Give the memory behind addresses back to the driver."""

    def release(self, address: int, num_bytes: int) -> None:
        """Give reserved addresses back, all of one reserve(), none of them mapped."""

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """View addresses, of which the first block is mapped, as uint8 (num_bytes,)."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_data", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def open_driver() -> Any:
    """Open the driver's library. Raises MachineError."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MachineError(f"no driver: {error}") from error


class DriverBlocks:
    """Blocks of one device's memory, from its driver (a BlockSource)."""

    def __init__(self, device: torch.device, driver: Any) -> None:
        """Ask for the size of blocks; the calling thread has the device's context.

        driver: see open_driver. Raises MachineError where it or the device has no such memory.
        """
        self._driver = driver
        self._device = device
        here = _Location(_ON_DEVICE, device.index or 0)
        self._kind = _Allocation(type=_PINNED, location=here)
        self._access = _Access(here, _READ_WRITE)
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._kind), _MINIMUM)
        self.block_bytes = size.value

    def try_out(self) -> None:
        """Do all of it once. Raises MachineError where the driver refuses."""
        address = self.reserve(self.block_bytes)
        try:
            self.map(address, self.block_bytes)
            self.unmap(address, self.block_bytes)
        finally:
            self.release(address, self.block_bytes)

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_ulonglong()
        size, zero = ctypes.c_size_t(num_bytes), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
        return address.value

    def map(self, address: int, num_bytes: int) -> None:
        size = ctypes.c_size_t(self.block_bytes)
        done = address
        try:
            for done in range(address, address + num_bytes, self.block_bytes):
                handle = ctypes.c_ulonglong()
                kind, zero = ctypes.byref(self._kind), ctypes.c_ulonglong(0)
                self._call("cuMemCreate", ctypes.byref(handle), size, kind, zero)
                try:
                    self._call("cuMemMap", ctypes.c_ulonglong(done), size, ctypes.c_size_t(0), handle, zero)
                finally:
                    self._call("cuMemRelease", handle)  # the mapping keeps the memory
            done = address + num_bytes
            access, count = ctypes.byref(self._access), ctypes.c_size_t(1)
            self._call(
                "cuMemSetAccess", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes), access, count
            )
        except BaseException:
            self.unmap(address, done - address)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        size = ctypes.c_size_t(self.block_bytes)
        for each in range(address, address + num_bytes, self.block_bytes):
            self._call("cuMemUnmap", ctypes.c_ulonglong(each), size)

    def release(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, num_bytes), device=self._device)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._driver, name)
        except AttributeError as error:
            raise MachineError(f"the driver has no {name}") from error
        status = function(*arguments)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the card has no memory left")
        if status:
            raise MachineError(f"{name}: the driver's error {status}")


class _Bytes:
    """Addresses as torch takes them: CUDA's array interface."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
