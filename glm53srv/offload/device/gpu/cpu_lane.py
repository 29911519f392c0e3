"""The CPU workers as the GPU's stream sees them: jobs by the plan kernel, a wait, their sums added."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions, CrewStats
from glm53srv.offload.device.gpu.launch import MailRing, int32_bits, power_of_two
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.offload.device.mailbox import HEADER_BYTES, Mailbox, MailboxShape

HAND_OVER_MS = 0.02
"""At start. From the device's post to the workers' start, and from their answer to the device's next kernel:
10 us each way on another machine (0xSero/glm53-flash-offload)."""
MAX_HAND_OVER_MS = 0.1
"""More is a stall, and counts as that much."""
HAND_OVER_JOBS = 500
"""Jobs after which one counts 1/e."""


class HandOver:
    """What a job takes beside its computing, followed online. Engine thread only.

    Where the GPU waits for the CPU, its clock sees a job whole, from post to answer; the workers' clock sees
    their part.
    """

    def __init__(self) -> None:
        self.value_ms = HAND_OVER_MS

    def observe(self, whole_ms: NDArray[np.float64], computed_ms: NDArray[np.float64]) -> None:
        """Take jobs, both (jobs,); whole_ms is NaN where it is not known."""
        found = np.clip((whole_ms - computed_ms)[np.isfinite(whole_ms)], 0.0, MAX_HAND_OVER_MS)
        if found.size:
            weight = 1 - (1 - 1 / HAND_OVER_JOBS) ** found.size
            self.value_ms += weight * (float(np.median(found)) - self.value_ms)


def make_ring(mailbox: Mailbox, device: torch.device | str) -> MailRing:
    """Describe a mailbox to kernels. Registered memory lies for the device where it does for the host."""
    return MailRing(
        address=mailbox.region.address + HEADER_BYTES,
        num_cells=mailbox.shape.num_cells,
        cell_bytes=mailbox.cell_bytes,
        weights_offset=mailbox.weights_offset,
        x_offset=mailbox.x_offset,
        y_offset=mailbox.y_offset,
        first_seq=torch.zeros(1, dtype=torch.int32, device=device),
        fence=torch.zeros(1, dtype=torch.int32, device=device),
    )


class CpuLane:
    """Owns mailbox and crew. Engine thread only.

    Per step: begin_step, its number to where the step's kernels read it; per layer plan kernel and combine
    kernel, both with `ring`; take_answers and check behind its end. The combine kernel's wait has no limit of
    its own: a crew that hangs answers every job by its watchdog, with an error that check() raises, so the
    stream goes on.
    """

    def __init__(
        self,
        arena: ExpertArena,
        max_rows: int,
        options: CrewOptions,
        extension: Any,
        device: torch.device,
        *,
        first_seq: int = 1,
    ) -> None:
        """Register the mailbox and start the workers; jobs count from first_seq. Raises MachineError."""
        geometry = arena.geometry
        self._num_layers = geometry.num_layers
        self._num_blocks = arena.layout.num_blocks
        # Cells of two steps, so that a step's answers can be read beside the next.
        cells = power_of_two(2 * geometry.num_layers)
        self._shape = MailboxShape(
            max_rows, geometry.top_k, arena.layout.hidden, num_cells=cells, first_seq=first_seq
        )
        self.mailbox = Mailbox(self._shape)
        self._memory = RegisteredMemory(extension)
        self._memory.pin(self.mailbox.region)
        self._next_seq = self._shape.first_seq
        self._posted = self._answered = range(0)
        self.ring = make_ring(self.mailbox, device)
        self.crew = Crew(arena, self.mailbox, options)
        self.hand_over = HandOver()

    def begin_step(self) -> int:
        """Wake the workers and number the step's jobs, one per sparse layer; the step must post them all.

        Gives the first one's number as an int32, for the place that the step's kernels read it from.
        """
        first = self._next_seq
        self._answered = self._posted
        self._posted = range(first, first + self._num_layers)
        self._next_seq = (first + self._num_layers) & 0xFFFFFFFF
        self.crew.ring()
        return int32_bits(first)

    @contextlib.contextmanager
    def numbered_at(self, first_job: torch.Tensor) -> Iterator[None]:
        """Let kernels launched inside read their step's number from first_job: int32 (1,), on the device."""
        usual = self.ring
        self.ring = replace(usual, first_seq=first_job)
        try:
            yield
        finally:
            self.ring = usual

    def check(self) -> None:
        """Raise EngineError if a job or the crew failed."""
        self.crew.check()

    def stats(self) -> CrewStats:
        """Count."""
        return self.crew.stats()

    def take_answers(self) -> NDArray[np.float64]:
        """Give (experts, ms of computing) of each job of the step before the one that begin_step began.

        In the order of layers: (layers, 2), or (0, 2) if they were given already. An expert in part counts as
        that part.
        That step's end must have been waited for.
        """
        answers = [self.mailbox.answer(seq) for seq in self._answered]
        self._answered = range(0)
        found = [(answer.num_blocks / self._num_blocks, answer.elapsed_ms) for answer in answers]
        return np.array(found, np.float64).reshape(-1, 2)

    def learn(self, answers: NDArray[np.float64], whole_ms: NDArray[np.float64]) -> None:
        """Follow the hand-over by a step's jobs.

        answers: as take_answers gives them. whole_ms: (layers,), by the device's clock, NaN where it did not
        wait.
        """
        if len(answers):
            num_experts, computed_ms = answers.T
            self.hand_over.observe(np.where(num_experts, whole_ms, np.nan), computed_ms)

    def whole_jobs(self, answers: NDArray[np.float64]) -> list[tuple[float, float]]:
        """Give (experts, ms from post to answer) of the jobs with experts."""
        return [(num, ms + self.hand_over.value_ms) for num, ms in answers.tolist() if num]

    def run_alone(self, layer: int, x: NDArray[np.float32], experts: NDArray[np.integer[Any]]) -> float:
        """Run one job by the host's door, for x float32 (1, hidden); gives the ms it would take a step.

        No step may be on its way.
        """
        picks = np.full((1, self._shape.max_picks), -1, np.int32)
        picks[0, : len(experts)] = experts
        weights = np.full(picks.shape, 0.125, np.float32)
        seq = self.crew.post(layer, x, picks, weights)
        self.crew.wait(seq, 1)
        self._next_seq = (seq + 1) & 0xFFFFFFFF  # the plans' jobs go on from there
        return self.mailbox.answer(seq).elapsed_ms + HAND_OVER_MS

    def close(self) -> None:
        """End the workers; the stream must be idle. Idempotent."""
        self.crew.close()
        self._memory.release()
