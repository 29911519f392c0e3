"""The native kernels as one Python object: a pool of threads that multiplies with EXL3 matrices and runs the
CPU engine's other hot loops.

The contract of each kernel, its order of sums and its thread rules stand in native/include/glm53_kernels.h.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.array_checks import as_rows, expect, shape_of
from glm53srv.errors import MachineError
from glm53srv.exl3_matrix import MATRIX_STRUCT, Codebook, Exl3Matrix, ExpertTable, Float16
from glm53srv.native_library import CpuFeatures, Isa, NativeLibrary, open_library

__all__ = [
    "Clamp",
    "Codebook",
    "CpuFeatures",
    "Exl3Matrix",
    "ExpertPart",
    "ExpertTable",
    "HyperConnection",
    "Isa",
    "KernelPool",
    "Precision",
    "cpu_features",
]

Float32 = NDArray[np.float32]


class Precision(enum.IntEnum):
    """EXACT32: float32 throughout, weights equal to the f16 codebook values. FAST16: see the C header."""

    EXACT32 = 0
    FAST16 = 1


class Clamp(enum.IntEnum):
    """What swiglu_limit clamps: GATE the gate before silu (the model), ACTIVATION its silu (exllamav3)."""

    GATE = 0
    ACTIVATION = 1


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """The weights of one hyper-connection site over four residual streams; float32, C-contiguous.

    fn: (24, 4 * hidden), rows for pre (4), post (4) and comb (16). base: (24,). scale: (3,) for pre, post,
    comb. norm_eps: rms_norm_eps. eps: hc_eps. sinkhorn_iters: hc_sinkhorn_iters (config keys of the
    checkpoint).
    """

    fn: Float32
    base: Float32
    scale: Float32
    sinkhorn_iters: int
    norm_eps: float
    eps: float


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """An expert that is computed in part: the 128-blocks [begin, end) of its intermediate."""

    expert: int
    begin: int
    end: int


class KernelPool:
    """Threads that run the kernels, and their scratch memory. A context manager; close() is idempotent.

    Every call computes one job on all threads and returns when it is done; the interpreter lock is released
    meanwhile. One job at a time: a call from a second thread while one runs raises RuntimeError. Results do
    not depend on num_threads, and a row's result does not depend on the other rows of a call (see the C
    header).
    """

    def __init__(
        self,
        num_threads: int,
        isa: Isa = Isa.AUTO,
        cpus: Sequence[int] | None = None,
        *,
        library: NativeLibrary | None = None,
    ) -> None:
        """Start num_threads - 1 workers; the calling thread is the other one.

        cpus: logical CPUs; worker i is pinned to cpus[i % len(cpus)]. Not being allowed to pin is no error,
        see num_pinned. library: by default the one beside this package. Raises MachineError if the kernels
        are not built or the instruction set is not there, ValueError for a count out of range.
        """
        self._pool: Any = None
        self._library = library or open_library()
        ffi, lib = self._library.ffi, self._library.lib
        if ffi.sizeof("glm53_matrix") != MATRIX_STRUCT.itemsize:
            raise MachineError(
                "the native kernels have another struct layout than this package; rebuild them"
            )
        if num_threads < 1 or (cpus is not None and len(cpus) == 0):
            raise ValueError("a pool needs at least one thread, and a list of CPUs at least one entry")
        cpu_array = ffi.NULL if cpus is None else ffi.new("int32_t[]", list(cpus))
        num_cpus = 0 if cpus is None else len(cpus)
        config = ffi.new("glm53_pool_config *", (num_threads, int(isa), cpu_array, num_cpus))
        handle = ffi.new("glm53_pool **")
        status = lib.glm53_pool_create(config, handle)
        if status == lib.GLM53_NO_ISA:
            offered = ", ".join(offer.name for offer in self._library.features().isas)
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
        x = as_rows(x, None)
        y = np.empty_like(x)
        if len(x):
            arguments = (self._floats(x), *x.shape, self._floats(y))
            self._check(self._library.lib.glm53_hadamard(self._handle(), *arguments))
        return y

    def linear(self, x: Float32, matrix: Exl3Matrix, precision: Precision = Precision.EXACT32) -> Float32:
        """Multiply x float32 (rows, in) into float32 (rows, out), scales, transforms and bias included."""
        x = as_rows(x, matrix.in_features)
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
        part: ExpertPart | None = None,
    ) -> Float32:
        """Sum the picked experts of each row: y[r] = sum_i weights[r, i] * expert[picks[r, i]](x[r]), i
        ascending.

        x: float32 (rows, hidden). picks: int32 (rows, k), -1 skips. weights: float32 (rows, k). limit:
        swiglu_limit, 0 for none. part: of one expert some blocks only, for up to 8 rows. Gives float32 (rows,
        hidden). Raises ValueError for shapes, picks outside the table, or a part that there is not.
        """
        x = as_rows(x, table.hidden)
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
        if part is not None:
            if not 0 <= part.begin < part.end:
                raise ValueError(f"no part of an expert: {part}")
            job.part_expert, job.part_begin, job.part_end = part.expert, part.begin, part.end
        self._check(self._library.lib.glm53_experts(self._handle(), job))
        return y

    def mhc_site(self, x: Float32, site: HyperConnection) -> tuple[Float32, Float32, Float32]:
        """Compute one hyper-connection site. x: float32 (rows, 4, hidden), the streams.

        Gives u (rows, hidden), the block's input before its norm; post (rows, 4) and comb (rows, 4, 4) for
        mhc_apply.
        """
        rows, streams, hidden = shape_of(x, "x", 3)
        expect(x, "x", (rows, 4, hidden))
        expect(site.fn, "fn", (24, streams * hidden))
        expect(site.base, "base", (24,))
        expect(site.scale, "scale", (3,))
        u = np.empty((rows, hidden), np.float32)
        post, comb = np.empty((rows, 4), np.float32), np.empty((rows, 4, 4), np.float32)
        if rows:
            job = self._library.ffi.new("glm53_mhc_job *")
            job.x, job.fn, job.base, job.scale = map(self._floats, (x, site.fn, site.base, site.scale))
            job.u, job.post, job.comb = map(self._floats, (u, post, comb))
            job.rows, job.hidden, job.sinkhorn_iters = rows, hidden, site.sinkhorn_iters
            job.norm_eps, job.eps = site.norm_eps, site.eps
            self._check(self._library.lib.glm53_mhc_site(self._handle(), job))
        return u, post, comb

    def mhc_apply(self, x: Float32, y: Float32, post: Float32, comb: Float32) -> Float32:
        """Mix a block's output into the streams: out[r, j] = post[r, j] y[r] + sum_i comb[r, i, j] x[r, i].

        x: float32 (rows, 4, hidden); y: (rows, hidden); post, comb: from mhc_site. Gives a new (rows, 4,
        hidden).
        """
        rows, _, hidden = shape_of(x, "x", 3)
        expect(x, "x", (rows, 4, hidden))
        expect(y, "y", (rows, hidden))
        expect(post, "post", (rows, 4))
        expect(comb, "comb", (rows, 4, 4))
        out = np.empty_like(x)
        if rows:
            arguments = (*map(self._floats, (x, y, post, comb)), rows, hidden, self._floats(out))
            self._check(self._library.lib.glm53_mhc_apply(self._handle(), *arguments))
        return out

    def kda(
        self, states: Sequence[Float32], q: Float32, k: Float32, v: Float32, g: Float32, beta: Float32
    ) -> Float32:
        """Run the gated delta rule over the tokens of each sequence, in order; the states change in place.

        states: one float32 (heads, 128 key, 128 value) per sequence, all different arrays. q, k, v, g (log
        decay): float32 (sequences, tokens, heads, 128), after convolution, silu, norm and scale. beta:
        (sequences, tokens, heads). Gives o like q. One call for many tokens gives the bits of one call per
        token.
        """
        shape = shape_of(q, "q", 4)
        sequences, tokens, heads, _ = shape
        expect(q, "q", (sequences, tokens, heads, 128))
        for name, array in (("k", k), ("v", v), ("g", g)):
            expect(array, name, shape)
        expect(beta, "beta", shape[:3])
        pointers = self._states(states, sequences, (heads, 128, 128))
        o = np.empty_like(q)
        if q.size:
            job = self._library.ffi.new("glm53_kda_job *")
            job.states = pointers
            job.q, job.k, job.v, job.g, job.beta, job.o = map(self._floats, (q, k, v, g, beta, o))
            job.num_sequences, job.tokens, job.heads = sequences, tokens, heads
            self._check(self._library.lib.glm53_kda(self._handle(), job))
        return o

    def conv(self, states: Sequence[Float32], x: Float32, weight: Float32) -> Float32:
        """Convolve causally and per channel with 4 taps, then apply silu; the states change in place.

        states: one float32 (3, channels) per sequence: the columns before the first token, oldest first,
        zeros at the start of a sequence. x: float32 (sequences, tokens, channels). weight: (4, channels),
        oldest tap first. Gives y like x, with the same bits for many tokens at once and one at a time.
        """
        sequences, tokens, channels = shape_of(x, "x", 3)
        expect(x, "x", (sequences, tokens, channels))
        expect(weight, "weight", (4, channels))
        pointers = self._states(states, sequences, (3, channels))
        y = np.empty_like(x)
        if x.size:
            job = self._library.ffi.new("glm53_conv_job *")
            job.states = pointers
            job.x, job.weight, job.y = map(self._floats, (x, weight, y))
            job.num_sequences, job.tokens, job.channels = sequences, tokens, channels
            self._check(self._library.lib.glm53_conv(self._handle(), job))
        return y

    def plain_linear(self, x: Float32, weight: Float32 | Float16) -> Float32:
        """Multiply x float32 (rows, in) by the transpose of weight f32 or f16 (out, in): (rows, out)."""
        is_f16 = weight.dtype == np.float16
        if weight.ndim != 2 or not (is_f16 or weight.dtype == np.float32) or not weight.flags.c_contiguous:
            raise ValueError(
                f"weight must be contiguous f32 or f16 (out, in), not {weight.dtype} {weight.shape}"
            )
        x = as_rows(x, weight.shape[1])
        y = np.empty((len(x), len(weight)), np.float32)
        if y.size:
            data = self._library.ffi.cast("void *", weight.ctypes.data)
            arguments = (
                data,
                int(is_f16),
                weight.shape[1],
                len(weight),
                self._floats(x),
                len(x),
                self._floats(y),
            )
            self._check(self._library.lib.glm53_plain_linear(self._handle(), *arguments))
        return y

    def rms_norm(self, x: Float32, weight: Float32 | None, eps: float) -> Float32:
        """Divide each row of x float32 (rows, width) by its root mean square, times weight (width,)."""
        x = as_rows(x, None)
        if weight is not None:
            expect(weight, "weight", (x.shape[1],))
        y = np.empty_like(x)
        if x.size:
            weight_data = self._library.ffi.NULL if weight is None else self._floats(weight)
            arguments = (self._floats(x), weight_data, *x.shape, eps, self._floats(y))
            self._check(self._library.lib.glm53_rms_norm(self._handle(), *arguments))
        return y

    def latent_attention(self, job: Any) -> None:
        """Run a glm53_latent_job; see latent_kernel.py, which makes one of arrays."""
        self._check(self._library.lib.glm53_latent_attention(self._handle(), job))

    def _states(self, states: Sequence[Float32], count: int, shape: tuple[int, ...]) -> Any:
        """Give a C array of pointers to per-sequence states, which must be writeable and distinct."""
        if len(states) != count:
            raise ValueError(f"{len(states)} states do not fit {count} sequences")
        for state in states:
            expect(state, "state", shape)
            if not state.flags.writeable:
                raise ValueError("state is read-only")
        if len({state.ctypes.data for state in states}) != count:
            raise ValueError("two sequences share a state")
        return self._library.ffi.new("float *[]", [self._floats(state) for state in states])

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
    return open_library().features()
