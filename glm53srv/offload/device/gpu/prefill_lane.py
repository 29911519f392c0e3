"""The CPU workers beside a short prompt's layers: part of the experts that would be read over the link.

    behind the router     picks and input to the host; the split; an errand for the crew; the GPU's picks
                          changed in place: stand-ins of weight 0
    behind the experts    its sums to the device, and added

The threads are the crew's, which does errands between the jobs of decode steps: such a job has as many rows
as the prompt, which a mailbox's cell does not hold, and threads of its own would run beside polling ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.cost import CostModel
from glm53srv.offload.device.crew import Crew
from glm53srv.offload.device.gpu.host_reader import launch_fetch
from glm53srv.offload.prefill_split import Pace, split_prefill


@dataclass(slots=True)
class PrefillWork:
    """Sums since the start. num_jobs: layers with an errand; num_experts: distinct ones of each.

    num_visits: (row, expert) pairs.

    In s: job_s computing, asked_s from asking for picks and input to a split, of which device_s waiting for
    the device, sent_s sending picks and sums, waited_s waiting for these.
    """

    num_jobs: int = 0
    num_experts: int = 0
    num_visits: int = 0
    job_s: float = 0.0
    asked_s: float = 0.0
    device_s: float = 0.0
    sent_s: float = 0.0
    waited_s: float = 0.0


class HostArrays:
    """What travels between a layer and its errand, in pinned memory that is there from the start.

    Memory that is pinned for each layer costs more than the way: three arrays took 14 ms, of 24 rows as of
    500 (an H200 machine, 2026-12-01).
    """

    def __init__(self, max_rows: int, hidden: int, top_k: int, *, pins: bool) -> None:
        def array(width: int, kind: torch.dtype, *, is_read: bool = True) -> torch.Tensor:
            return torch.empty((max_rows, width), dtype=kind, pin_memory=pins and is_read)

        self.x = array(hidden, torch.float16)
        self.picks = array(top_k, torch.int64)
        self.weights = array(top_k, torch.float16)
        self.rows = array(hidden, torch.float32, is_read=False)  # x, for the CPU
        self.gpu_picks = array(top_k, torch.int64)
        self.gpu_weights = array(top_k, torch.float16)
        self.sums = array(hidden, torch.float32)


class PrefillLane:
    """The errand of the layer that runs. Engine thread only.

    Per layer take(), then add(). Not for chunks whose experts are staged. A layer's arrays are free again
    when the next one's picks are there: they come behind all that read them.
    """

    def __init__(self, max_rows: int, hidden: int, top_k: int, device: torch.device) -> None:
        """Allocate for chunks of up to max_rows rows; nothing for 0."""
        self.work = PrefillWork()
        self._pace = Pace()
        self._host = HostArrays(max_rows, hidden, top_k, pins=device.type == "cuda" and max_rows > 0)
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._crew: Crew | None = None  # whose errand is on its way
        self._expected_ms = 0.0  # of it, at pace 1

    @property
    def pace(self) -> float:
        """How much longer errands take than the costs of decode steps say."""
        return self._pace.value

    def take(
        self,
        crew: Crew,
        layer: int,
        x: torch.Tensor,
        picks: torch.Tensor,
        weights: torch.Tensor,
        table: NDArray[np.int32],
        costs: CostModel,
    ) -> None:
        """Give the crew its part of a layer; picks and weights are changed in place. Waits for the device.

        x: float16 (rows, hidden). picks: int64, weights: float16 (rows, top_k), contiguous. table: int32
        (experts,), the layer's row of the residency table, -1 for what is not in VRAM. Raises EngineError if
        the crew failed.
        """
        host, num = self._host, len(x)
        begin = time.perf_counter()
        for target, source in ((host.picks, picks), (host.weights, weights), (host.x, x)):
            target[:num].copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()
            self._event.synchronize()
        self.work.device_s += time.perf_counter() - begin
        chosen, factors = host.picks[:num].numpy(), host.weights[:num].numpy()
        split = split_prefill(chosen, table >= 0, self._pace.apply(costs))
        if split is not None:
            host.rows[:num].copy_(host.x[:num])
        self.work.asked_s += time.perf_counter() - begin
        if split is None:
            return
        begin = time.perf_counter()
        rows, sums = host.rows[:num].numpy(), host.sums[:num].numpy()
        crew.begin(layer, rows, split.cpu_picks, factors.astype(np.float32), sums)
        self._crew, self._expected_ms = crew, split.expected_ms / self._pace.value
        self.work.num_jobs += 1
        self.work.num_experts += len(np.unique(chosen[split.on_cpu]))
        self.work.num_visits += int(np.count_nonzero(split.on_cpu))
        host.gpu_picks[:num].numpy()[:] = split.gpu_picks
        host.gpu_weights[:num].numpy()[:] = np.where(split.on_cpu, np.float16(0), factors)
        launch_fetch(host.gpu_picks[:num], picks)
        launch_fetch(host.gpu_weights[:num], weights)
        self.work.sent_s += time.perf_counter() - begin

    def add(self, out: torch.Tensor) -> None:
        """Add the crew's part to a layer's sum, float32 (rows, hidden), in place; waits for it on the host.

        Raises EngineError if the crew failed.
        """
        crew, self._crew = self._crew, None
        if crew is None:
            return
        begin = time.perf_counter()
        elapsed_ms = crew.finish()
        end = time.perf_counter()
        partial = torch.empty_like(out)
        launch_fetch(self._host.sums[: len(out)], partial)
        out += partial
        self.work.waited_s += end - begin
        self.work.sent_s += time.perf_counter() - end
        self.work.job_s += elapsed_ms / 1e3
        self._pace.observe(self._expected_ms, elapsed_ms)

    def drop(self) -> None:
        """Forget the errand of a chunk that is given up, once it is done."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.finish()
