"""The running counts of an offload."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.report import OffloadCounts
from glm53srv.offload.split import Lane

LOOK_MS = 0.01
"""A wait that is longer was one: looking at an answer that is there takes some microseconds of the link."""


@dataclass(slots=True)
class Counts:
    """OffloadCounts in the making. Owned by the engine thread."""

    num_steps: int = 0
    num_vram: int = 0
    num_link: int = 0
    num_cpu: int = 0
    num_copies: int = 0
    num_staged: int = 0
    num_loans: int = 0
    num_picks: int = 0
    num_hit_picks: int = 0
    num_kept: int = 0
    num_guessed: int = 0
    num_guessed_right: int = 0
    gpu_lane_ms: float = 0.0
    cpu_wait_ms: float = 0.0
    num_cpu_last: int = 0
    num_split: int = 0
    num_prompt_cpu: int = 0
    prompt_cpu_ms: float = 0.0
    prompt_device_ms: float = 0.0
    prompt_wait_ms: float = 0.0

    @property
    def hit_share(self) -> float | None:
        """Distinct experts that a slot served, of all that decode steps picked; None before the first."""
        total = self.num_vram + self.num_link + self.num_cpu
        return self.num_vram / total if total else None

    def add_log(
        self,
        picks: NDArray[np.int32],
        kept: NDArray[np.int32],
        lanes: NDArray[np.int8],
        counts: NDArray[np.int32],
        guesses: NDArray[np.int32],
    ) -> None:
        """Add a decode step's routing log.

        picks, kept, lanes: (layers, picks), -1 for no pick, and for no slot that was taken. counts: (layers,
        7 or more), distinct experts in VRAM, over the link, on the CPU; three times; and the blocks of the
        shared one on the CPU. guesses: (layers, 2 or more), experts that were fetched ahead, and how many of
        them were picked.
        """
        in_vram, over_link, on_cpu = counts[:, :3].sum(axis=0).tolist()
        self.num_vram += in_vram
        self.num_link += over_link
        self.num_cpu += on_cpu
        self.num_picks += int((picks >= 0).sum())
        self.num_hit_picks += int((lanes == Lane.VRAM).sum())
        self.num_kept += int((kept >= 0).sum())
        self.num_split += int((counts[:, 6] > 0).sum())
        guessed, right = guesses[:, :2].sum(axis=0).tolist()
        self.num_guessed += guessed
        self.num_guessed_right += right

    def add_times(self, gpu_lane_ms: float, wait_ms: NDArray[np.float64]) -> None:
        """Add a decode step's lanes: the GPU's in all, and each layer's wait for the CPU behind it."""
        self.gpu_lane_ms += gpu_lane_ms
        self.cpu_wait_ms += float(wait_ms.sum())
        self.num_cpu_last += int((wait_ms > LOOK_MS).sum())

    def set_prompts(self, num_experts: int, cpu_s: float, device_s: float, wait_s: float) -> None:
        """Take what short prompts came to so far."""
        self.num_prompt_cpu = num_experts
        self.prompt_cpu_ms, self.prompt_device_ms, self.prompt_wait_ms = (
            1e3 * cpu_s,
            1e3 * device_s,
            1e3 * wait_s,
        )

    def frozen(self) -> OffloadCounts:
        """Give the values so far."""
        return OffloadCounts(*(getattr(self, field.name) for field in fields(self)))
