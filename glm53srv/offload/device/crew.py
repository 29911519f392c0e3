"""The CPU tier: native threads that compute experts from the arena for whoever posts into a mailbox."""

from __future__ import annotations

import contextlib
import logging
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import EngineError, MachineError
from glm53srv.exl3_matrix import MATRIX_STRUCT
from glm53srv.kernels import Clamp, ExpertPart, Isa, Precision
from glm53srv.native_library import open_library
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.mailbox import Mailbox
from glm53srv.offload.device.region import Region

logger = logging.getLogger(__name__)

Float32 = NDArray[np.float32]

_left_behind: list[Any] = []
"""Arrays of errands that a hanging thread may still read and write."""

WAIT_MARGIN_MS = 500
"""How much longer a caller waits than the watchdog, which therefore speaks first."""


@dataclass(frozen=True, slots=True)
class CrewOptions:
    """num_threads: the polling lead included. cpus: logical CPUs, thread i on cpus[i % len], or None.

    poll_us: how long an idle crew polls before it parks: longer than the gap between two layers of a step,
    shorter than that between two requests. deadline_ms: age of an unanswered job at which the crew is given
    up; a stuck thread is an error after at most 5/4 of it. clamp: ACTIVATION is what the GPU's kernels do.
    """

    num_threads: int
    cpus: tuple[int, ...] | None = None
    isa: Isa = Isa.AUTO
    precision: Precision = Precision.FAST16
    clamp: Clamp = Clamp.ACTIVATION
    limit: float = 0.0
    poll_us: int = 2000
    deadline_ms: int = 1000


@dataclass(frozen=True, slots=True)
class CrewStats:
    """Counts since the start. num_picks: (row, expert) pairs. busy_ms: time spent computing.

    num_experts: distinct ones, summed over jobs; num_whole: the same, with those in part counted by their
    size.
    """

    num_jobs: int
    num_empty: int
    num_picks: int
    num_experts: int
    num_whole: float
    busy_ms: float
    num_parks: int

    @property
    def ms_per_expert(self) -> float:
        """Mean time of one expert; 0 before the first."""
        return self.busy_ms / self.num_whole if self.num_whole else 0.0


@dataclass(frozen=True, slots=True)
class Errand:
    """The arrays of a job of any number of rows that is on its way."""

    x: Float32
    picks: NDArray[np.int32]
    weights: Float32
    sums: Float32


class Crew:
    """Threads that answer a mailbox, and do errands between its jobs. post, wait, begin and finish belong to
    one thread, the engine's.

    A crew that fails (a thread stuck or dead) makes wait and check raise EngineError; only close may follow.
    """

    def __init__(
        self, arena: ExpertArena, mailbox: Mailbox, options: CrewOptions, *, compute: Any = None
    ) -> None:
        """Start the threads. compute: a C function in place of the kernels, by which tests inject faults.

        Raises MachineError when threads or the instruction set are missing.
        """
        library = open_library()
        ffi, lib = library.ffi, library.lib
        self._library = library
        self._handle: Any = None
        self._mailbox = mailbox
        self._options = options
        self._num_blocks = arena.layout.num_blocks
        self._errand: Errand | None = None
        self._table = _copy_table(arena)
        cpus = ffi.NULL if options.cpus is None else ffi.new("int32_t[]", list(options.cpus))
        config = ffi.new("glm53_crew_config *")
        config.mailbox = mailbox.region.pointer
        config.table = ffi.cast("glm53_expert *", self._table.pointer)
        config.num_layers, config.num_experts = arena.geometry.num_layers, arena.geometry.num_experts
        config.precision, config.clamp, config.limit = (
            int(options.precision),
            int(options.clamp),
            options.limit,
        )
        config.isa, config.num_threads = int(options.isa), options.num_threads
        config.cpus, config.num_cpus = cpus, 0 if options.cpus is None else len(options.cpus)
        config.poll_us, config.deadline_ms = options.poll_us, options.deadline_ms
        config.compute = ffi.NULL if compute is None else compute
        handle = ffi.new("glm53_crew **")
        status = lib.glm53_crew_create(config, handle)
        if status != lib.GLM53_OK:
            raise MachineError(f"cannot start {options.num_threads} CPU workers: {self._text(status)}")
        self._handle = handle[0]
        # Also at the interpreter's end and when nobody holds the crew any more: the threads read memory that
        # would be unmapped under them. The regions are the callback's until then.
        self._end = weakref.finalize(self, _end_threads, library, handle[0], (self._table, mailbox, arena))
        self.num_pinned = int(self._describe().num_pinned)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ring(self) -> None:
        """Wake the crew: before a step whose jobs a GPU posts."""
        self._library.lib.glm53_crew_ring(self._open())

    def post(
        self,
        layer: int,
        x: NDArray[np.float32],
        picks: NDArray[np.int32],
        weights: NDArray[np.float32],
        part: ExpertPart | None = None,
    ) -> int:
        """Post the experts of a layer for some rows; gives the job's number.

        x: float32 (rows, hidden). picks: int32 (rows, k), an expert of the layer or -1. weights: float32
        (rows, k). All are copied. part: the expert that is computed in part, from its first block on. Raises
        ValueError for shapes, EngineError if the mailbox is full.
        """
        shape = self._mailbox.shape
        if x.ndim != 2 or x.shape[1] != shape.hidden or not 1 <= len(x) <= shape.max_rows:
            raise ValueError(f"x {x.shape} does not fit a mailbox of {shape}")
        if picks.shape != weights.shape or picks.ndim != 2 or len(picks) != len(x):
            raise ValueError(f"picks {picks.shape} and weights {weights.shape} do not fit {len(x)} rows")
        if part is not None and part.begin:
            raise ValueError(f"the workers compute parts from the first block on, not {part}")
        ffi, lib = self._library.ffi, self._library.lib
        rows = np.ascontiguousarray(x, np.float32)
        chosen = np.ascontiguousarray(picks, np.int32)
        factors = np.ascontiguousarray(weights, np.float32)
        mail = ffi.new("glm53_mail *")
        mail.x = ffi.cast("float *", rows.ctypes.data)
        mail.picks = ffi.cast("int32_t *", chosen.ctypes.data)
        mail.weights = ffi.cast("float *", factors.ctypes.data)
        mail.layer, mail.rows, mail.num_picks = layer, len(rows), chosen.shape[1]
        if part is not None:
            mail.part_expert, mail.part_blocks = part.expert, part.end
        seq = ffi.new("uint32_t *")
        status = lib.glm53_crew_post(self._open(), mail, seq)
        if status == lib.GLM53_FULL:
            raise EngineError(f"the mailbox is full: {shape.num_cells} jobs wait for the CPU workers")
        self._require(status, "a job")
        return int(seq[0])

    def wait(self, seq: int, num_rows: int) -> NDArray[np.float32]:
        """Wait for a job; gives its sums, a view (num_rows, hidden) valid until its cell is used again.

        Raises EngineError when the crew failed, within 5/4 of the deadline and WAIT_MARGIN_MS at the latest.
        """
        timeout_ms = self._options.deadline_ms + self._options.deadline_ms // 4 + WAIT_MARGIN_MS
        self._require(self._library.lib.glm53_crew_wait(self._open(), seq, timeout_ms), f"job {seq}")
        return self._mailbox.partial(seq, num_rows)

    def begin(
        self, layer: int, x: Float32, picks: NDArray[np.int32], weights: Float32, sums: Float32
    ) -> None:
        """Begin an errand: the experts of a layer for any number of rows, by the same threads.

        x: float32 (rows, hidden). picks: int32 (rows, k), an expert of the layer or -1. weights: float32
        (rows, k). sums: float32 (rows, hidden), written until finish. All C-contiguous, none is copied.
        Raises ValueError for shapes, or if an errand was begun and not finished; EngineError if the crew
        failed.
        """
        hidden = self._mailbox.shape.hidden
        if x.ndim != 2 or x.shape[1] != hidden or not len(x) or sums.shape != x.shape:
            raise ValueError(f"x {x.shape} and sums {sums.shape} are not of rows with {hidden} values")
        if picks.shape != weights.shape or picks.ndim != 2 or len(picks) != len(x) or not picks.size:
            raise ValueError(f"picks {picks.shape} and weights {weights.shape} do not fit {len(x)} rows")
        if self._errand is not None:
            raise ValueError("the workers are on an errand already")
        kinds = [(array.dtype, array.flags.c_contiguous) for array in (x, picks, weights, sums)]
        if kinds != [(np.dtype(kind), True) for kind in (np.float32, np.int32, np.float32, np.float32)]:
            raise ValueError(f"an errand needs contiguous float32 and int32 arrays, not {kinds}")
        ffi, lib = self._library.ffi, self._library.lib
        errand = Errand(x, picks, weights, sums)
        job = ffi.new("glm53_expert_job *")
        job.x = ffi.cast("float *", errand.x.ctypes.data)
        job.picks = ffi.cast("int32_t *", errand.picks.ctypes.data)
        job.weights = ffi.cast("float *", errand.weights.ctypes.data)
        job.y = ffi.cast("float *", errand.sums.ctypes.data)
        job.rows, job.num_picks = errand.picks.shape
        self._require(lib.glm53_crew_begin(self._open(), layer, job), "an errand")
        self._errand = errand

    def finish(self) -> float:
        """Wait for the errand; gives the ms of its computing.

        Raises ValueError without one; EngineError if it could not be done, or the crew failed.
        """
        errand, self._errand = self._errand, None
        if errand is None:
            raise ValueError("the workers are on no errand")
        elapsed_ns = self._library.ffi.new("int64_t *")
        status = self._library.lib.glm53_crew_finish(self._open(), elapsed_ns)
        if status == self._library.lib.GLM53_STALLED:
            _left_behind.append(errand)
        self._require(status, "an errand")
        return float(elapsed_ns[0]) / 1e6

    def check(self) -> None:
        """Raise EngineError if a job failed or the crew did: after a step whose jobs a GPU posted."""
        self._require(self._library.lib.glm53_crew_check(self._open()), "a job")

    def stats(self) -> CrewStats:
        """Count."""
        found = self._describe()
        return CrewStats(
            num_jobs=int(found.num_jobs),
            num_empty=int(found.num_empty),
            num_picks=int(found.num_picks),
            num_experts=int(found.num_experts),
            num_whole=int(found.num_blocks) / self._num_blocks,
            busy_ms=int(found.busy_ns) / 1e6,
            num_parks=int(found.num_parks),
        )

    def close(self) -> None:
        """End the threads, behind an errand. Idempotent.

        A thread that hangs is left behind, with the memory that it uses.
        """
        if self._handle is not None:
            if self._errand is not None:
                with contextlib.suppress(EngineError):
                    self.finish()
            self._handle = None
            self._end()

    def _open(self) -> Any:
        if self._handle is None:
            raise ValueError("the crew is closed")
        return self._handle

    def _describe(self) -> Any:
        stats = self._library.ffi.new("glm53_crew_stats *")
        self._library.lib.glm53_crew_describe(self._open(), stats)
        return stats

    def _text(self, status: int) -> str:
        return str(self._library.ffi.string(self._library.lib.glm53_status_text(status)).decode())

    def _require(self, status: int, what: str) -> None:
        if status == self._library.lib.GLM53_STALLED:
            raise EngineError(
                f"the CPU workers did not answer {what} within {self._options.deadline_ms} ms: a thread "
                "hangs, was killed, or the machine is overloaded; the engine must be restarted"
            )
        if status != self._library.lib.GLM53_OK:
            raise EngineError(f"the CPU workers refused {what}: {self._text(status)}")


def _end_threads(library: Any, handle: Any, memory: tuple[Region, Mailbox, ExpertArena]) -> None:
    """End a crew's threads; memory: what they read and write, left mapped if one of them hangs."""
    if library.lib.glm53_crew_destroy(handle) != library.lib.GLM53_OK:
        logger.error("a CPU worker hangs; its memory stays in use until the process ends")
        table, mailbox, arena = memory
        for each in (table, mailbox.region, arena):
            each.abandon()


def _copy_table(arena: ExpertArena) -> Region:
    """Lay out the experts of all layers as one C array, in memory that can outlive this process's objects."""
    matrices = [
        matrix.descriptor
        for layer in range(arena.geometry.num_layers)
        for expert in arena.experts(layer)
        for matrix in expert
    ]
    table = np.concatenate(matrices)
    region = Region(table.nbytes)
    region.array().view(MATRIX_STRUCT)[:] = table
    return region
