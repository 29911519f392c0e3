"""The routing log on its way to the host: read one step later, when it has long arrived."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepLog:
    """A step's routing log: picks, kept int32, lanes int8 (layers, picks), counts int32 (layers, words).

    guesses: int32 (layers, TOLD_WORDS), experts that were fetched ahead, and how many of them were picked.

    Views of pinned memory, valid until the next but one swap.
    """

    picks: NDArray[np.int32]
    kept: NDArray[np.int32]
    lanes: NDArray[np.int8]
    counts: NDArray[np.int32]
    guesses: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Of a step's layers that have a CPU part or none: gpu_lanes gives experts in VRAM, over the link, and ms
    from the plan to the last expert's end. wait_ms: what the GPU then waited for the CPU, float64 (layers,).
    cpu_ms: from the plan to the CPU's answer, float64 (all layers,), NaN where the GPU did not wait for it.
    gap_ms: from the end of the layer in front to a layer's plan, float64 (all layers,), NaN where one of them
    was not timed.
    """

    gpu_lanes: list[tuple[float, float, float]]
    wait_ms: NDArray[np.float64]
    cpu_ms: NDArray[np.float64]
    gap_ms: NDArray[np.float64]


WAITED_NS = 12_000
"""What is longer was a wait: looking at an answer that is there takes 4 to 5 us (H200, traced, 30 November
2026)."""


def read_stamps(log: StepLog, num_blocks: int) -> LaneTimes:
    """Read the times that plan and combine kernels left; empty where the device has no clock.

    num_blocks: of an expert's intermediate. What the CPU computes of a shared expert is not carried over the
    link, but the GPU computes it, too, as zeros.
    """
    planned, arrived, answered = log.counts[:, 3:6].T
    is_timed = (planned != 0) & (arrived != 0)
    lane_ms = (arrived - planned)[is_timed].astype(np.float64) / 1e6  # low words: differences wrap as they do
    # What was fetched ahead took the layer no time of the link's: hits, as the split says.
    off_link = log.guesses[is_timed, 1] + log.counts[is_timed, 6] / num_blocks
    hits = (log.counts[is_timed, 0] + off_link).tolist()
    link = (log.counts[is_timed, 1] - off_link).tolist()
    wait_ms = (answered - arrived)[is_timed].astype(np.float64) / 1e6
    has_waited = is_timed & (answered - arrived > WAITED_NS)
    cpu_ms = np.where(has_waited, (answered - planned) / 1e6, np.nan)
    gap_ms = np.full(len(planned), np.nan)
    is_known = is_timed[1:] & is_timed[:-1]
    gap_ms[1:] = np.where(is_known, (planned[1:] - answered[:-1]) / 1e6, np.nan)
    return LaneTimes(list(zip(hits, link, lane_ms.tolist(), strict=True)), wait_ms, cpu_ms, gap_ms)


class HostLogs:
    """Two pinned copies of the device's log: one travels while the other is read. Engine thread only."""

    def __init__(
        self, words: torch.Tensor, lanes: torch.Tensor, counts: torch.Tensor, guesses: torch.Tensor
    ) -> None:
        """words: int32 (2, layers, picks), the picks and what was kept of them."""
        self._sources = (words, lanes, counts, guesses)
        self._buffers = [
            tuple(torch.empty(source.shape, dtype=source.dtype).pin_memory() for source in self._sources)
            for _ in range(2)
        ]
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        self._widths = [0, 0]
        self._are_guessed = [False, False]
        self._parity = 0

    def swap(self, width: int, *, is_guessed: bool) -> StepLog | None:
        """Enqueue the copy of the running step's log, `width` picks a layer; give that of the step before.

        is_guessed: layers were guessed in it; else what is told of guesses is an older step's, and left out.
        Waits for the step before, which is over by then. None before the second step.
        """
        now, before = self._parity, 1 - self._parity
        for target, source in zip(self._buffers[now], self._sources, strict=True):
            target.copy_(source, non_blocking=True)
        self._events[now].record()
        self._widths[now] = width
        self._are_guessed[now] = is_guessed
        self._parity = before
        return self._read(before)

    def take_last(self) -> StepLog | None:
        """Wait for the newest step and give its log; None if it was given already."""
        return self._read(1 - self._parity)

    def _read(self, index: int) -> StepLog | None:
        used, self._widths[index] = self._widths[index], 0
        if not used:
            return None
        self._events[index].synchronize()
        words, lanes, counts, guesses = self._buffers[index]
        picks, kept = words[:, :, :used].numpy()
        told = guesses.numpy() if self._are_guessed[index] else np.zeros_like(guesses.numpy())
        return StepLog(picks, kept, lanes[:, :used].numpy(), counts.numpy(), told)
