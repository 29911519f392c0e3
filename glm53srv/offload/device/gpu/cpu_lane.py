"""The CPU workers as the GPU's stream sees them: jobs by the plan kernel, a wait, their sums added."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions, CrewStats
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.launch import MailCell
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.offload.device.mailbox import DONE, HEADER_BYTES, POSTED, Mailbox, MailboxShape
from glm53srv.offload.device.region import Region

HAND_OVER_MS = 0.02
"""From the device's post to the workers' start, and from their answer to the device's next kernel: 10 us each
way on another machine (0xSero/glm53-flash-offload). Not timed here: a job of the host's goes another way,
which takes ten times as long."""


class CpuLane:
    """Owns mailbox and crew. Engine thread only.

    Per step: begin_step; per layer next_cell (for the plan kernel), publish, combine; check after it.
    The stream's wait has no limit of its own: a crew that hangs answers every job by its watchdog, with an
    error that check() raises, so the stream goes on.
    """

    def __init__(self, arena: ExpertArena, max_rows: int, options: CrewOptions, extension: Any) -> None:
        """Register the mailbox and start the workers. Raises MachineError."""
        geometry = arena.geometry
        self._posted: list[int] = []
        self._extension = extension
        self._shape = MailboxShape(max_rows, geometry.top_k, arena.layout.hidden)
        self.mailbox = Mailbox(self._shape)
        self._memory = RegisteredMemory(extension)
        self._memory.pin(self.mailbox.region)
        self._abort = Region(4096)  # a word that stays 0: the package's fallback kernel looks at it
        self._abort_memory = RegisteredMemory(extension)
        self._abort_memory.pin(self._abort)
        self._address = self.mailbox.region.address  # the device's too: registered memory under UVA
        self.crew = Crew(arena, self.mailbox, options)
        self._next_seq = self._shape.first_seq
        self._open_seq: int | None = None

    def begin_step(self) -> None:
        """Wake the workers."""
        self._posted.clear()
        self.crew.ring()

    def next_cell(self) -> MailCell:
        """Take the next job's cell for a plan; publish() posts it behind the plan."""
        seq = self._next_seq
        self._next_seq = (seq + 1) & 0xFFFFFFFF
        self._open_seq = seq
        self._posted.append(seq)
        mailbox = self.mailbox
        return MailCell(self._cell(seq), seq, mailbox.weights_offset, mailbox.x_offset, publishes=False)

    def publish(self) -> None:
        """Post the job of next_cell, in stream order behind the kernel that wrote it.

        By a write of the stream and not by an exchange inside the kernel: not every link carries atomics.
        """
        if self._open_seq is not None:
            self._extension.exl3_moe_flag_write(self._cell(self._open_seq) + POSTED, self._open_seq)

    def combine(self, out: torch.Tensor, counts: torch.Tensor) -> None:
        """Wait in the stream for the job just posted, and add its sums to out, float32 (rows, hidden)."""
        seq, self._open_seq = self._open_seq, None
        if seq is None:
            return
        cell = self._cell(seq)
        self._extension.exl3_moe_flag_wait(cell + DONE, seq, self._abort.address)
        launch_combine(out, counts, cell + self.mailbox.y_offset)

    def check(self) -> None:
        """Raise EngineError if a job or the crew failed."""
        self.crew.check()

    def stats(self) -> CrewStats:
        """Count."""
        return self.crew.stats()

    def take_answers(self) -> list[tuple[int, float]]:
        """Give (experts, ms) of each job with experts that this step posted; after the step's end."""
        answers = [self.mailbox.answer(seq) for seq in self._posted[-self._shape.num_cells :]]
        self._posted.clear()
        return [
            (answer.num_experts, answer.elapsed_ms + HAND_OVER_MS) for answer in answers if answer.num_experts
        ]

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
        self._abort_memory.release()

    def _cell(self, seq: int) -> int:
        return self._address + HEADER_BYTES + seq % self._shape.num_cells * self.mailbox.cell_bytes
