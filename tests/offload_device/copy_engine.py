"""The driver's calls that the courier makes, where there is no GPU: the caller copies, at once."""

from __future__ import annotations

import ctypes
import threading

from glm53srv.offload.device.courier import DriverCalls

_ENTER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MARK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
CONTEXT, STREAM = 0x51, 0x52


class CopyEngine:
    """Counts calls. error: what copies return from now on. drops_marks: numbers are not written. hold():
    copies wait until release()."""

    def __init__(self) -> None:
        self.error = 0
        self.drops_marks = False
        self.num_copies = 0
        self.marks: list[int] = []
        self.contexts: list[int | None] = []
        self._free = threading.Event()
        self._free.set()
        self._functions = (_ENTER(self._enter), _COPY(self._copy), _MARK(self._mark))

    def calls(self) -> DriverCalls:
        """Give what takes the driver's place."""
        addresses = [int(ctypes.cast(each, ctypes.c_void_p).value or 0) for each in self._functions]
        return DriverCalls(addresses[0], addresses[1], addresses[2], CONTEXT)

    def hold(self) -> None:
        """Let copies wait from now on."""
        self._free.clear()

    def release(self) -> None:
        """Let them go on."""
        self._free.set()

    def _enter(self, context: int | None) -> int:
        self.contexts.append(context)
        return 0

    def _copy(self, target: int, source: int, num_bytes: int, stream: int | None) -> int:
        self._free.wait()
        if self.error:
            return self.error
        ctypes.memmove(target, source, num_bytes)
        self.num_copies += 1
        return 0

    def _mark(self, stream: int | None, address: int, value: int, flags: int) -> int:
        if self.drops_marks:
            return 0
        ctypes.c_uint32.from_address(address).value = value
        self.marks.append(value)
        return 0
