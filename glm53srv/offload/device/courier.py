"""A host thread that has a GPU's copy engine copy what kernels name: native/src/courier.c."""

from __future__ import annotations

import ctypes
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm53srv.errors import EngineError, MachineError
from glm53srv.native_library import open_library
from glm53srv.offload.device.pinning import Pinning
from glm53srv.offload.device.region import Region

MOST_COPIES = 4
"""Of one order."""
CELL_BYTES = 128
POLL_US = 200_000
"""Longer than from a ring to the step's first order, which may be behind a whole chunk of a prompt: one that
parks before looks again only after 100 ms, and with 2 ms most orders after a pause were late (H200)."""
CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """Addresses of what the courier calls, by cuda.h: cuCtxSetCurrent, cuMemcpyHtoDAsync,
    cuStreamWriteValue32; and the context that it enters."""

    enter: int
    copy: int
    mark: int
    context: int


def find_driver_calls() -> DriverCalls:
    """Give those of the driver, with the calling thread's context. Raises MachineError."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        names = ("cuCtxSetCurrent", "cuMemcpyHtoDAsync_v2", "cuStreamWriteValue32_v2")
        calls = [int(ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0) for name in names]
    except (OSError, AttributeError) as error:
        raise MachineError(f"the driver lacks what copies by the copy engine need: {error}") from error
    context = ctypes.c_void_p()
    status = driver.cuCtxGetCurrent(ctypes.byref(context))
    if status or not context.value:
        raise MachineError(f"the engine's thread has no context of the driver (error {status})")
    return DriverCalls(calls[0], calls[1], calls[2], context.value)


@dataclass(frozen=True, slots=True)
class CourierStats:
    """Counts since the start."""

    num_orders: int
    num_copies: int
    num_parks: int


class Courier:
    """Owns ring and thread. Methods belong to one thread, the engine's. region: the ring, which kernels
    write."""

    def __init__(self, num_cells: int, first_seq: int = 1, pinning: Pinning | None = None) -> None:
        """Make the ring; start() begins to serve it. num_cells: a power of two. pinning: registers the ring.
        Raises MachineError."""
        library = open_library()
        self._library = library
        self._handle: Any = None
        self._end: Any = None
        self.num_cells, self.first_seq = num_cells, first_seq
        self.region = Region((num_cells + 1) * CELL_BYTES)  # behind the cells the word of take_late
        status = library.lib.glm53_courier_init(self.region.pointer, num_cells, first_seq & 0xFFFFFFFF)
        if status != library.lib.GLM53_OK:
            raise ValueError(f"a courier's ring of {num_cells} cells: {self._text(status)}")
        self._pinning = pinning
        if pinning is not None:
            pinning.pin(self.region)

    def start(
        self, calls: DriverCalls, record_bytes: int, stream: int, arrived: int, poll_us: int = POLL_US
    ) -> None:
        """Start the thread. stream: the driver's handle. arrived: address of the word on the device to which
        numbers are written. Raises MachineError."""
        ffi, lib = self._library.ffi, self._library.lib
        config = ffi.new("glm53_courier_config *")
        config.ring, config.num_cells = self.region.pointer, self.num_cells
        config.first_seq, config.record_bytes = self.first_seq & 0xFFFFFFFF, record_bytes
        config.enter = ffi.cast("glm53_enter_fn", calls.enter)
        config.copy = ffi.cast("glm53_copy_fn", calls.copy)
        config.mark = ffi.cast("glm53_mark_fn", calls.mark)
        config.context = ffi.cast("void *", calls.context)
        config.stream = ffi.cast("void *", stream)
        config.arrived, config.poll_us = arrived, poll_us
        handle = ffi.new("glm53_courier **")
        status = lib.glm53_courier_create(config, handle)
        if status != lib.GLM53_OK:
            raise MachineError(f"cannot start the courier: {self._text(status)}")
        self._handle = handle[0]
        self._end = weakref.finalize(self, _end_thread, self._library, handle[0], self.region)

    @property
    def late_address(self) -> int:
        """Where a kernel that did not wait any longer leaves 1: an int32 behind the cells."""
        return self.region.address + self.num_cells * CELL_BYTES

    def ring(self) -> None:
        """Wake it: before a step whose orders a GPU posts."""
        self._library.lib.glm53_courier_ring(self._open())

    def check(self) -> None:
        """Raise EngineError if the driver refused a copy."""
        error = int(self._describe().error)
        if error:
            raise EngineError(f"the driver refused a copy of an expert fetched ahead: error {error}")

    def take_late(self) -> bool:
        """Tell whether a kernel did not wait any longer since this was asked last."""
        late = self.region.array()[self.num_cells * CELL_BYTES :][:4].view(np.int32)
        was_late, late[0] = bool(late[0]), 0
        return was_late

    def catch_up(self, newest: int, timeout_s: float = CATCH_UP_S) -> None:
        """Wait until it has handed all orders up to this number, 32 bits, to the driver. Raises
        EngineError."""
        end = time.monotonic() + timeout_s
        self.ring()
        while (newest + 1 - self.first_seq - self.stats().num_orders) & 0xFFFFFFFF:
            self.check()
            if time.monotonic() > end:
                raise EngineError(f"experts fetched ahead did not come within {timeout_s:.0f} s")
            time.sleep(0.0002)
        self.check()

    def stats(self) -> CourierStats:
        """Count."""
        found = self._describe()
        return CourierStats(int(found.num_orders), int(found.num_copies), int(found.num_parks))

    def close(self) -> None:
        """End the thread; the device must be idle. Idempotent."""
        if self._handle is not None:
            self._handle = None
            self._end()
        if self._pinning is not None:
            self._pinning.release()

    def _open(self) -> Any:
        if self._handle is None:
            raise ValueError("the courier does not run")
        return self._handle

    def _describe(self) -> Any:
        found = self._library.ffi.new("glm53_courier_stats *")
        self._library.lib.glm53_courier_describe(self._open(), found)
        return found

    def _text(self, status: int) -> str:
        text: str = self._library.ffi.string(self._library.lib.glm53_status_text(status)).decode()
        return text


def _end_thread(library: Any, handle: Any, region: Region) -> None:
    library.lib.glm53_courier_destroy(handle)
    del region  # the thread reads it to its end
