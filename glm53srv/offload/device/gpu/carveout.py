"""Lets kernels with much shared memory start on a multiprocessor where one of ours runs.

Shared memory and first-level cache are one memory, and how it is divided on a multiprocessor cannot change
while anything runs there. Without a preference a kernel that uses no shared memory may run where most is
cache; the package's products ask for up to 90 KiB of shared memory and prefer the largest part, so they would
have to wait for its end. exllamav3's source notes some 4 us a launch for such a change between its own
kernels (exl3_gemv_int8.cu, 1.5.1).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

MOST, USUAL = 100, -1
"""Percent of a multiprocessor's memory that may be shared memory; the driver's own choice."""
_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of cuda.h."""


class _Preference:
    """What is asked for from now on, and what each function was told last. Engine thread only."""

    def __init__(self) -> None:
        self.percent = MOST
        self.told: dict[int, int] = {}


_preference = _Preference()


def prefer(percent: int) -> None:
    """Ask for MOST or USUAL from the next launch of each kernel on; for measurements."""
    _preference.percent = percent


def leave_room(launched: Any) -> None:
    """Tell the driver for the kernel that was just launched, if it does not know; its later launches heed it.

    launched: what Triton's launch gives: a compiled kernel, None under the interpreter. A hint: a driver that
    does not take it is logged once.
    """
    function = getattr(launched, "function", None)
    percent = _preference.percent
    if function is None or _preference.told.get(function) == percent:
        return
    _preference.told[function] = percent
    status = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if status:
        logger.warning("the driver does not divide shared memory for kernels beside others: error %d", status)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
