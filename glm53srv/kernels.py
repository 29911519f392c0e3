"""The native kernels as Python objects: EXL3 matrices, expert tables, and a pool of threads that multiplies
with them.

The only file that touches cffi. The library comes in one of two forms, both built by `python -m cffi_build`:
an extension module (cffi API mode) or, where Python.h is missing, a plain shared library (ABI mode).
Importing this module loads neither; the first KernelPool or cpu_features() does. The contract of each kernel,
its order of sums and its thread rules stand in native/include/glm53_kernels.h.
"""

from __future__ import annotations

import enum
import functools
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import cffi
import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import MachineError

Float32 = NDArray[np.float32]
Float16 = NDArray[np.float16]

_BUILD_HINT = "build them with: python -m cffi_build"

_MATRIX_STRUCT = np.dtype(
    [
        ("trellis", np.uintp),
        ("suh", np.uintp),
        ("svh", np.uintp),
        ("bias", np.uintp),
        ("in_features", np.int32),
        ("out_features", np.int32),
        ("bits_x2", np.int32),
        ("codebook", np.int32),
    ],
    align=True,
)
"""glm53_matrix; its size is compared with the library's when a pool is made."""


class Codebook(enum.IntEnum):
    """How a 16-bit state becomes a weight; the checkpoint says which by a tensor `mcg` or `mul1`, or none."""

    DEFAULT = 0
    MCG = 1
    MUL1 = 2


class Precision(enum.IntEnum):
    """EXACT32: float32 throughout, weights equal to the f16 codebook values. FAST16: see the C header."""

    EXACT32 = 0
    FAST16 = 1


class Isa(enum.IntEnum):
    """Instruction sets, worst first; AUTO takes the best that CPU and build have."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3


class Clamp(enum.IntEnum):
    """What swiglu_limit clamps: GATE the gate before silu (the model), ACTIVATION its silu (exllamav3)."""

    GATE = 0
    ACTIVATION = 1


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What this CPU and this build offer. mode: "api" or "abi"; library: the file that was loaded."""

    isas: tuple[Isa, ...]
    mode: str
    library: str


class Exl3Matrix:
    """One EXL3-quantised matrix W (in, out), y = x W. Immutable; keeps its arrays alive, copies none of them.

    trellis: int16 or uint16 (in/16, out/16, words), the packed tiles as in the checkpoint; suh: float16
    (in,); svh: float16 (out,); bias: float16 (out,) or None. All C-contiguous; read-only memory maps are
    fine. Raises ValueError with one line that says which of them does not fit.
    """

    def __init__(
        self,
        trellis: NDArray[np.int16] | NDArray[np.uint16],
        suh: Float16,
        svh: Float16,
        codebook: Codebook,
        bias: Float16 | None = None,
    ) -> None:
        if trellis.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)) or trellis.ndim != 3:
            raise ValueError(f"trellis must be int16 of 3 dimensions, not {trellis.dtype} {trellis.shape}")
        words = trellis.shape[2]
        self.in_features = trellis.shape[0] * 16
        self.out_features = trellis.shape[1] * 16
        for name, size in (("in", self.in_features), ("out", self.out_features)):
            if size == 0 or size % 128:
                raise ValueError(f"trellis has {size} {name} features, not a positive multiple of 128")
        bits_x2 = words // 8
        has_bits = words % 8 == 0 and (
            (bits_x2 % 2 == 0 and 2 <= bits_x2 <= 16) or (codebook is Codebook.MUL1 and bits_x2 in (3, 5, 7))
        )
        if not has_bits:
            raise ValueError(
                f"trellis has {words} words per tile, which codebook {codebook.name} does not have"
            )
        for name, vector, size in (("suh", suh, self.in_features), ("svh", svh, self.out_features)):
            _check_vector(name, vector, size)
        if bias is not None:
            _check_vector("bias", bias, self.out_features)
        if not trellis.flags.c_contiguous:
            raise ValueError("trellis is not C-contiguous")
        self.codebook = codebook
        self.bits = bits_x2 / 2
        self.num_bytes = trellis.nbytes + suh.nbytes + svh.nbytes + (0 if bias is None else bias.nbytes)
        self._arrays = (trellis, suh, svh, bias)
        self.descriptor = np.zeros(1, _MATRIX_STRUCT)
        """glm53_matrix, (1,); read-only."""
        bias_address = 0 if bias is None else bias.ctypes.data
        addresses = (trellis.ctypes.data, suh.ctypes.data, svh.ctypes.data, bias_address)
        self.descriptor[0] = (*addresses, self.in_features, self.out_features, bits_x2, int(codebook))
        self.descriptor.flags.writeable = False


class ExpertTable:
    """The experts of one layer as one C array, built once. Keeps the matrices alive; copies no weights.

    experts: (gate, up, down) each; gate and up (hidden, intermediate), down (intermediate, hidden), the same
    shapes for all. Raises ValueError with one line that names the first expert that does not fit.
    """

    def __init__(self, experts: Sequence[tuple[Exl3Matrix, Exl3Matrix, Exl3Matrix]]) -> None:
        if not experts:
            raise ValueError("a table needs at least one expert")
        self.hidden = experts[0][0].in_features
        self.intermediate = experts[0][0].out_features
        inward, outward = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        for index, (gate, up, down) in enumerate(experts):
            for name, matrix, shape in (("gate", gate, inward), ("up", up, inward), ("down", down, outward)):
                if (matrix.in_features, matrix.out_features) != shape:
                    found = (matrix.in_features, matrix.out_features)
                    raise ValueError(f"{name} of expert {index} has shape {found}, not {shape}")
        self._experts = tuple(experts)
        self.descriptor = np.concatenate([matrix.descriptor for expert in experts for matrix in expert])
        """glm53_expert (num_experts,), seen as glm53_matrix (3 * num_experts,); read-only."""
        self.descriptor.flags.writeable = False

    def __len__(self) -> int:
        return len(self._experts)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for expert in self._experts for matrix in expert)


class KernelPool:
    """Threads that run the kernels, and their scratch memory. A context manager; close() is idempotent.

    Every call computes one job on all threads and returns when it is done; the interpreter lock is released
    meanwhile. One job at a time: a call from a second thread while one runs raises RuntimeError. Results do
    not depend on num_threads, and a row's result does not depend on the other rows of a call (see the C
    header).
    """

    def __init__(self, num_threads: int, isa: Isa = Isa.AUTO, cpus: Sequence[int] | None = None) -> None:
        """Start num_threads - 1 workers; the calling thread is the other one.

        cpus: logical CPUs; worker i is pinned to cpus[i % len(cpus)]. Not being allowed to pin is no error,
        see num_pinned. Raises MachineError if the kernels are not built or the instruction set is not there,
        ValueError for a count out of range.
        """
        self._pool: Any = None
        self._library = _load()
        ffi, lib = self._library.ffi, self._library.lib
        if num_threads < 1 or (cpus is not None and len(cpus) == 0):
            raise ValueError("a pool needs at least one thread, and a list of CPUs at least one entry")
        cpu_array = ffi.NULL if cpus is None else ffi.new("int32_t[]", list(cpus))
        num_cpus = 0 if cpus is None else len(cpus)
        config = ffi.new("glm53_pool_config *", (num_threads, int(isa), cpu_array, num_cpus))
        handle = ffi.new("glm53_pool **")
        status = lib.glm53_pool_create(config, handle)
        if status == lib.GLM53_NO_ISA:
            offered = ", ".join(offer.name for offer in cpu_features().isas)
            raise MachineError(f"instruction set {isa.name} is not there: this CPU and build offer {offered}")
        if status in (lib.GLM53_NO_THREAD, lib.GLM53_NO_MEMORY):
            raise MachineError(f"cannot start {num_threads} kernel threads: {self._status_text(status)}")
        self._check(status)
        self._pool = handle[0]
        info = self._describe()
        self.isa = Isa(info.isa)
        self.num_threads = int(info.num_threads)
        self.num_pinned = int(info.num_pinned)

    def __enter__(self) -> KernelPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and free the scratch memory. No job may be running."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._library.lib.glm53_pool_destroy(pool)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory; grows to the largest job and stays."""
        return int(self._describe().scratch_bytes)

    def effective_precision(self, matrix: Exl3Matrix, precision: Precision) -> Precision:
        """Say in which precision a product runs: FAST16 falls back to EXACT32 where there is none."""
        used = self._library.lib.glm53_effective_precision(
            self._handle(), self._matrix(matrix), int(precision)
        )
        return Precision(used)

    def decode(self, matrix: Exl3Matrix) -> Float32:
        """Give the weights in the rotated basis, float32 (in, out), equal to the f16 codebook values."""
        w = np.empty((matrix.in_features, matrix.out_features), np.float32)
        self._check(self._library.lib.glm53_decode(self._handle(), self._matrix(matrix), self._floats(w)))
        return w

    def hadamard(self, x: Float32) -> Float32:
        """Transform each run of 128 columns by the orthonormal Hadamard matrix. x: float32 (rows, width)."""
        x = _rows(x, None)
        y = np.empty_like(x)
        if len(x):
            arguments = (self._floats(x), *x.shape, self._floats(y))
            self._check(self._library.lib.glm53_hadamard(self._handle(), *arguments))
        return y

    def linear(self, x: Float32, matrix: Exl3Matrix, precision: Precision = Precision.EXACT32) -> Float32:
        """Multiply x float32 (rows, in) into float32 (rows, out), scales, transforms and bias included."""
        x = _rows(x, matrix.in_features)
        y = np.empty((len(x), matrix.out_features), np.float32)
        if len(x):
            arguments = (self._matrix(matrix), self._floats(x), len(x), int(precision), self._floats(y))
            self._check(self._library.lib.glm53_linear(self._handle(), *arguments))
        return y

    def experts(
        self,
        x: Float32,
        table: ExpertTable,
        picks: NDArray[np.int32],
        weights: Float32,
        limit: float,
        clamp: Clamp = Clamp.GATE,
        precision: Precision = Precision.EXACT32,
    ) -> Float32:
        """Sum the picked experts of each row: y[r] = sum_i weights[r, i] * expert[picks[r, i]](x[r]), i
        ascending.

        x: float32 (rows, hidden). picks: int32 (rows, k), -1 skips. weights: float32 (rows, k). limit:
        swiglu_limit, 0 for none. Gives float32 (rows, hidden). Raises ValueError for shapes, or picks outside
        the table.
        """
        x = _rows(x, table.hidden)
        picks = np.ascontiguousarray(picks, np.int32)
        weights = np.ascontiguousarray(weights, np.float32)
        if picks.ndim != 2 or picks.shape != weights.shape or len(picks) != len(x):
            raise ValueError(f"picks {picks.shape} and weights {weights.shape} do not fit {len(x)} rows")
        if picks.size == 0:
            return np.zeros_like(x)
        y = np.empty_like(x)
        ffi = self._library.ffi
        job = ffi.new("glm53_expert_job *")
        job.table = ffi.cast("glm53_expert *", table.descriptor.ctypes.data)
        job.picks = ffi.cast("int32_t *", picks.ctypes.data)
        job.x, job.weights, job.y = self._floats(x), self._floats(weights), self._floats(y)
        job.num_experts, job.rows, job.num_picks = len(table), len(x), picks.shape[1]
        job.clamp, job.precision, job.limit = int(clamp), int(precision), limit
        self._check(self._library.lib.glm53_experts(self._handle(), job))
        return y

    def _handle(self) -> Any:
        if self._pool is None:
            raise ValueError("the kernel pool is closed")
        return self._pool

    def _describe(self) -> Any:
        info = self._library.ffi.new("glm53_pool_info *")
        self._check(self._library.lib.glm53_pool_describe(self._handle(), info))
        return info

    def _matrix(self, matrix: Exl3Matrix) -> Any:
        return self._library.ffi.cast("glm53_matrix *", matrix.descriptor.ctypes.data)

    def _floats(self, array: Float32) -> Any:
        return self._library.ffi.cast("float *", array.ctypes.data)

    def _status_text(self, status: int) -> str:
        return str(self._library.ffi.string(self._library.lib.glm53_status_text(status)).decode())

    def _check(self, status: int) -> None:
        lib = self._library.lib
        if status == lib.GLM53_OK:
            return
        text = self._status_text(status)
        if status == lib.GLM53_NO_MEMORY:
            raise MemoryError(f"native kernels: {text}")
        if status == lib.GLM53_BUSY:
            raise RuntimeError(f"native kernels: {text}")
        raise ValueError(f"native kernels: {text}")


def cpu_features() -> CpuFeatures:
    """Say what this CPU and this build offer. Raises MachineError if the kernels are not built."""
    library = _load()
    mask = library.lib.glm53_isa_mask()
    isas = tuple(isa for isa in Isa if mask >> isa & 1)
    return CpuFeatures(isas=isas, mode=library.mode, library=library.path)


@dataclass(frozen=True, slots=True)
class _Library:
    ffi: Any
    lib: Any
    mode: str
    path: str


@functools.cache
def _load(directory: Path | None = None) -> _Library:
    """Load whichever library lies in the package directory, the newest first. Raises MachineError."""
    directory = directory or Path(__file__).resolve().parent
    found = sorted(directory.glob("_kernels*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    reasons = []
    for path in found:
        try:
            library = _open_abi(path) if path.name == "_kernels_abi.so" else _open_api(path)
        except (ImportError, OSError, KeyError, ValueError) as error:
            reasons.append(f"{path.name}: {error}")
            continue
        if library.ffi.sizeof("glm53_matrix") == _MATRIX_STRUCT.itemsize:
            return library
        reasons.append(f"{path.name}: built from another version of the header")
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    raise MachineError(f"the native kernels are not built{detail}; {_BUILD_HINT}")


def _open_api(path: Path) -> _Library:
    module = importlib.import_module("glm53srv._kernels")
    return _Library(module.ffi, module.lib, "api", str(path))


def _open_abi(path: Path) -> _Library:
    ffi = cffi.FFI()
    ffi.cdef(json.loads((path.parent / "_kernels_build.json").read_text())["cdef"])
    return _Library(ffi, ffi.dlopen(str(path)), "abi", str(path))


def _check_vector(name: str, vector: Float16, size: int) -> None:
    if vector.dtype != np.float16 or vector.shape != (size,) or not vector.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous float16 ({size},), not {vector.dtype} {vector.shape}")


def _rows(x: Float32, width: int | None) -> Float32:
    """Check type and shape; give x, or a contiguous copy of it if it is strided."""
    if x.dtype != np.float32 or x.ndim != 2 or (width is not None and x.shape[1] != width):
        wanted = "(rows, width)" if width is None else f"(rows, {width})"
        raise ValueError(f"expected float32 {wanted}, not {x.dtype} {x.shape}")
    return np.ascontiguousarray(x)
