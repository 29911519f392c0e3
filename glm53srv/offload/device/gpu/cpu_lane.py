"""The CPU workers as the GPU's stream sees them: jobs by the plan kernel, a wait, their sums added."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from glm53srv.offload.cost import fit_cpu_cost
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions, CrewStats
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.launch import MailCell
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.offload.device.mailbox import DONE, HEADER_BYTES, POSTED, Mailbox, MailboxShape
from glm53srv.offload.device.region import Region

CALIBRATION_SIZES = (1, 2, 4, 8)
CALIBRATION_ROUNDS = 5


class CpuLane:
    """Owns mailbox and crew. Engine thread only.

    Per step: begin_step; per layer next_cell (for the plan kernel), publish, combine; check after it.
    The stream's wait has no limit of its own: a crew that hangs answers every job by its watchdog, with an
    error that check() raises, so the stream goes on.
    """

    def __init__(self, arena: ExpertArena, max_rows: int, options: CrewOptions, extension: Any) -> None:
        """Register the mailbox and start the workers. Raises MachineError."""
        geometry = arena.geometry
        self._extension = extension
        self._shape = MailboxShape(max_rows, geometry.top_k, arena.layout.hidden)
        self.mailbox = Mailbox(self._shape)
        self._memory = RegisteredMemory(extension)
        self._memory.pin(self.mailbox.region)
        self._abort = Region(4096)  # a word that stays 0: the package's fallback kernel looks at it
        self._abort_memory = RegisteredMemory(extension)
        self._abort_memory.pin(self._abort)
        self._address = self.mailbox.region.address  # the device's too: registered memory under UVA
        self._arena = arena
        self.crew = Crew(arena, self.mailbox, options)
        self._next_seq = self._shape.first_seq
        self._open_seq: int | None = None

    def begin_step(self) -> None:
        """Wake the workers."""
        self.crew.ring()

    def next_cell(self) -> MailCell:
        """Take the next job's cell for a plan; publish() posts it behind the plan."""
        seq = self._next_seq
        self._next_seq = (seq + 1) & 0xFFFFFFFF
        self._open_seq = seq
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

    def calibrate(self) -> tuple[float, float]:
        """Measure (fixed ms, ms per expert) with jobs of several sizes; the GPU must post none meanwhile.

        Jobs go by the host's door and take their numbers from the same count.
        """
        geometry = self._arena.geometry
        x = np.random.default_rng(0).standard_normal((1, self._arena.layout.hidden), np.float32)
        samples: list[tuple[int, float]] = []
        sizes = [size for size in CALIBRATION_SIZES if size <= geometry.top_k]
        for number in range(CALIBRATION_ROUNDS):
            for size in sizes:
                picks = np.full((1, geometry.top_k), -1, np.int32)
                begin = (number * 31 + size * 7) % (geometry.num_experts - size + 1)
                picks[0, :size] = np.arange(begin, begin + size)
                weights = np.full(picks.shape, 0.125, np.float32)
                seq = self.crew.post(number % geometry.num_layers, x, picks, weights)
                self.crew.wait(seq, 1)
                self._next_seq = (seq + 1) & 0xFFFFFFFF
                if number:
                    samples.append((size, self.mailbox.answer(seq).elapsed_ms))
        return fit_cpu_cost(samples)

    def close(self) -> None:
        """End the workers; the stream must be idle. Idempotent."""
        self.crew.close()
        self._memory.release()
        self._abort_memory.release()

    def _cell(self, seq: int) -> int:
        return self._address + HEADER_BYTES + seq % self._shape.num_cells * self.mailbox.cell_bytes
