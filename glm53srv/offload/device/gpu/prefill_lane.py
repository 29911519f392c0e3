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
from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.prefill_split import Pace, split_prefill

NUM_KEPT = 8
"""Three arrays a layer, of which the sums have megabytes; the next layer's picks are waited for behind
them."""


@dataclass(slots=True)
class PrefillWork:
    """Sums since the start. num_jobs: layers with an errand; num_experts: distinct ones of each.

    num_visits: (row, expert) pairs.

    In s: job_s computing, asked_s the host's wait for picks and input, sent_s its sending of picks and sums,
    waited_s its wait for these.
    """

    num_jobs: int = 0
    num_experts: int = 0
    num_visits: int = 0
    job_s: float = 0.0
    asked_s: float = 0.0
    sent_s: float = 0.0
    waited_s: float = 0.0


class PrefillLane:
    """The errand of the layer that runs. Engine thread only.

    Per layer take(), then add(). Not for chunks whose experts are staged.
    """

    def __init__(self) -> None:
        self.work = PrefillWork()
        self._pace = Pace()
        self._reader = HostReader(NUM_KEPT)
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

        x: float16 (rows, hidden). picks: int64, weights: float16 (rows, top_k). table: int32 (experts,), the
        layer's row of the residency table, -1 for what is not in VRAM. Raises EngineError if the crew failed.
        """
        begin = time.perf_counter()
        chosen = picks.cpu().numpy()
        split = split_prefill(chosen, table >= 0, self._pace.apply(costs))
        if split is None:
            self.work.asked_s += time.perf_counter() - begin
            return
        factors = weights.cpu()
        rows = x.cpu().float().numpy()
        self.work.asked_s += time.perf_counter() - begin
        crew.begin(layer, rows, split.cpu_picks, factors.float().numpy())
        self._crew, self._expected_ms = crew, split.expected_ms / self._pace.value
        self.work.num_jobs += 1
        self.work.num_experts += len(np.unique(chosen[split.on_cpu]))
        self.work.num_visits += int(np.count_nonzero(split.on_cpu))
        begin = time.perf_counter()
        self._reader.send(split.gpu_picks, picks)
        self._reader.send(np.where(split.on_cpu, np.float16(0), factors.numpy()), weights)
        self.work.sent_s += time.perf_counter() - begin

    def add(self, out: torch.Tensor) -> None:
        """Add the crew's part to a layer's sum, float32 (rows, hidden), in place; waits for it on the host.

        Raises EngineError if the crew failed.
        """
        crew, self._crew = self._crew, None
        if crew is None:
            return
        partial = torch.empty_like(out)
        begin = time.perf_counter()
        sums, elapsed_ms = crew.finish()
        end = time.perf_counter()
        self._reader.send(sums, partial)
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
