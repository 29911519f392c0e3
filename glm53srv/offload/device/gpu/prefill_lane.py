"""The CPU workers beside a short prompt's layers: part of the experts that would be read over the link.

    behind the router     picks and input to the host; the split; a job for the CPU's threads; the GPU's picks
                          changed in place: stand-ins of weight 0
    behind the experts    the job's sums to the device, and added

Its threads are a pool of its own on the crew's CPUs: a job has as many rows as the prompt, which the mailbox
of decode steps does not hold. Where the crew still polls behind a decode step, both share the CPUs for a
moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.kernels import Clamp, KernelPool, Precision
from glm53srv.offload.cost import CostModel
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.prefill_split import split_prefill

NUM_KEPT = 8
"""Three arrays a layer, of which the sums have megabytes; the next layer's picks are waited for behind
them."""


@dataclass(slots=True)
class PrefillWork:
    """Sums since the start. num_experts: distinct ones of each job; num_visits: (row, expert) pairs.

    In s: job_s computing, asked_s the host's wait for picks and input, waited_s its wait for sums.
    """

    num_jobs: int = 0
    num_experts: int = 0
    num_visits: int = 0
    job_s: float = 0.0
    asked_s: float = 0.0
    waited_s: float = 0.0


class PrefillLane:
    """Owns a pool of threads and the job of the layer that runs. Engine thread only.

    Per layer take(), then add(). Not for chunks whose experts are staged.
    """

    def __init__(
        self, arena: ExpertArena, num_threads: int, cpus: Sequence[int] | None, limit: float
    ) -> None:
        """Start the threads. limit: swiglu_limit. Raises MachineError."""
        self._arena = arena
        self._limit = limit
        self._pool = KernelPool(num_threads, cpus=cpus)
        self._caller = ThreadPoolExecutor(1, "prefill-lane")
        self._reader = HostReader(NUM_KEPT)
        self._job: Future[NDArray[np.float32]] | None = None
        self.work = PrefillWork()

    def take(
        self,
        layer: int,
        x: torch.Tensor,
        picks: torch.Tensor,
        weights: torch.Tensor,
        table: NDArray[np.int32],
        costs: CostModel,
    ) -> None:
        """Give the CPU its part of a layer; picks and weights are changed in place. Waits for the device.

        x: float16 (rows, hidden). picks: int64, weights: float16 (rows, top_k). table: int32 (experts,), the
        layer's row of the residency table, -1 for what is not in VRAM.
        """
        begin = time.perf_counter()
        chosen = picks.cpu().numpy()
        split = split_prefill(chosen, table >= 0, costs)
        if split is None:
            self.work.asked_s += time.perf_counter() - begin
            return
        factors = weights.cpu()
        rows = x.cpu().float().numpy()
        self.work.asked_s += time.perf_counter() - begin
        self.work.num_jobs += 1
        self.work.num_experts += len(np.unique(chosen[split.on_cpu]))
        self.work.num_visits += int(np.count_nonzero(split.on_cpu))
        self._job = self._caller.submit(self._compute, layer, rows, split.cpu_picks, factors.float().numpy())
        self._reader.send(split.gpu_picks, picks)
        self._reader.send(np.where(split.on_cpu, np.float16(0), factors.numpy()), weights)

    def add(self, out: torch.Tensor) -> None:
        """Add the CPU's part to a layer's sum, float32 (rows, hidden), in place; waits for it on the host."""
        job, self._job = self._job, None
        if job is None:
            return
        partial = torch.empty_like(out)
        begin = time.perf_counter()
        sums = job.result()
        self.work.waited_s += time.perf_counter() - begin
        self._reader.send(sums, partial)
        out += partial

    def drop(self) -> None:
        """Forget the job of a chunk that is given up, once it is done."""
        job, self._job = self._job, None
        if job is not None:
            job.exception()

    def close(self) -> None:
        """End the threads. Idempotent."""
        self.drop()
        self._caller.shutdown()
        self._pool.close()

    def _compute(
        self, layer: int, rows: NDArray[np.float32], picks: NDArray[np.int32], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        begin = time.perf_counter()
        table = self._arena.table(layer)
        sums = self._pool.experts(
            rows, table, picks, factors, self._limit, Clamp.ACTIVATION, Precision.FAST16
        )
        self.work.job_s += time.perf_counter() - begin
        return sums


def make_lane(arena: ExpertArena, options: Any, limit: float) -> PrefillLane | None:
    """Make the lane that OffloadOptions ask for, None where they ask for none. Raises MachineError."""
    if options.mode == "exact" or options.crew_threads < 1 or options.cpu_prefill_tokens < 1:
        return None
    return PrefillLane(arena, options.crew_threads, options.crew_cpus, limit)
