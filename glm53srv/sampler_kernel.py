"""The native part of sampling: filters, draw and log softmax over one row of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import MachineError
from glm53srv.native_library import Isa, NativeLibrary, open_library
from glm53srv.request import SamplingParams

Logits = NDArray[np.float32]
IdArray = NDArray[np.int32]


class SamplerKernel:
    """Owns a native sampler, with scratch memory of 36 bytes per id. One thread at a time.

    Rows are float32 (ids,) of 1 to max_ids ids, contiguous, without NaN and plus infinity, borrowed for the
    call; `largest` is their maximum, and finite. Every instruction set gives the same bits. Rules and source:
    native/include/glm53_kernels.h.
    """

    def __init__(self, max_ids: int, isa: Isa = Isa.AUTO, *, library: NativeLibrary | None = None) -> None:
        """Allocate. library: by default the one beside this package.

        Raises MachineError if the kernels are not built or the instruction set is not there.
        """
        self._sampler: Any = None
        self._library = library or open_library()
        self._ffi, self._lib = self._library.ffi, self._library.lib
        handle = self._ffi.new("glm53_sampler **")
        status = self._lib.glm53_sampler_create(max_ids, int(isa), handle)
        if status == self._lib.GLM53_NO_ISA:
            raise MachineError(f"instruction set {isa.name} is not there")
        self._check(status)
        self._sampler = self._ffi.gc(handle[0], self._lib.glm53_sampler_destroy)
        self._id = self._ffi.new("int32_t *")
        self._total = self._ffi.new("double *")

    def draw(self, row: Logits, largest: float, params: SamplingParams, u: float) -> int:
        """Give the id that temperature, top_k, top_p and min_p of params, and u in [0, 1), decide on.

        params.temperature is above 0. The GIL is released meanwhile.
        """
        filters = self._ffi.new(
            "glm53_filters *", (params.temperature, params.top_p, params.min_p, min(params.top_k, len(row)))
        )
        arguments = (self._floats(row), len(row), largest, filters, u, self._id)
        self._check(self._lib.glm53_sampler_draw(self._sampler, *arguments))
        return int(self._id[0])

    def total(self, row: Logits, largest: float) -> float:
        """Give the sum of e^(logit - largest)."""
        self._check(
            self._lib.glm53_sampler_total(self._sampler, self._floats(row), len(row), largest, self._total)
        )
        return float(self._total[0])

    def top(self, row: Logits, count: int) -> IdArray:
        """Give the first `count` ids of the ranking by (logit descending, id ascending), best first."""
        ids = np.empty(count, dtype=np.int32)
        if count == 0:
            return ids
        pointer = self._ffi.cast("int32_t *", ids.ctypes.data)
        self._check(self._lib.glm53_sampler_top(self._sampler, self._floats(row), len(row), count, pointer))
        return ids[np.argsort(-row[ids], kind="stable")]

    def _floats(self, row: Logits) -> Any:
        if row.dtype != np.float32 or row.ndim != 1 or not row.flags.c_contiguous:
            raise ValueError(f"logits must be contiguous float32 (ids,), not {row.dtype} {row.shape}")
        return self._ffi.cast("float *", row.ctypes.data)

    def _check(self, status: int) -> None:
        lib = self._lib
        if status == lib.GLM53_NO_MEMORY:
            raise MemoryError("the sampler's scratch memory cannot be had")
        if status != lib.GLM53_OK:
            text = self._ffi.string(lib.glm53_status_text(status)).decode()
            raise ValueError(f"native kernels: {text}")
