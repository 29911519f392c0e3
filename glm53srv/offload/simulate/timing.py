"""The virtual clock: how long a step takes when GPU, CPU, copy engine and RAM share what there is.

A step is a chain of layers. In each, first the part outside the routed experts (an equal share of
fixed_ms), then the two lanes side by side. Within a layer rates are constant between events (a lane ends, a
copy queue runs dry), so the clock jumps from event to event:

    link    the GPU reading in place and the copy engine share it half and half while both want it
    RAM     CPU lane and link together get at most dram_gb_s; above that all slow down alike
    GPU     reads its misses, then computes hits; the layer ends when the slower lane does

The order inside the GPU lane is pessimistic: a real kernel overlaps the two. Left out: jitter, clock
changes, and a slower gather under CPU load (14.5 against 23.6 GB/s in one published engine): give a profile
with that rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.simulate.profile import HardwareProfile

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step took.

    cpu_wait_ms: time the GPU had ended its lane and the CPU had not. cpu_busy_ms: length of all CPU jobs.
    Bytes: by zero-copy reads, by the copy engine during the step, by the CPU lane.
    """

    total_ms: float
    fixed_ms: float
    cpu_wait_ms: float
    cpu_busy_ms: float
    link_bytes: float
    copied_bytes: float
    cpu_bytes: float


class StepTimer:
    """Computes StepTime for a profile. Holds no state between steps."""

    def __init__(self, profile: HardwareProfile, expert_bytes: int) -> None:
        self.profile = profile
        self.expert_bytes = expert_bytes
        self._cpu_rate = expert_bytes / profile.cpu_expert_ms  # bytes per ms
        self._read_rate = profile.zero_copy_gb_s * 1e6
        self._copy_rate = profile.copy_gb_s * 1e6
        self._link_rate = profile.link_gb_s * 1e6
        self._dram_rate = profile.dram_gb_s * 1e6

    def step(
        self,
        num_hits: NDArray[np.integer],
        num_link: NDArray[np.integer | np.floating],
        num_cpu: NDArray[np.integer | np.floating],
        num_streams: int,
        queued_bytes: float,
    ) -> StepTime:
        """Time a decode step: counts of distinct experts per lane, one entry per layer; a fraction is a part
        of one, which the GPU computes whole.

        queued_bytes: what the copy engine still has to move when the step begins.
        """
        fixed = self.profile.step_fixed_ms(num_streams)
        share = fixed / len(num_hits)
        total = waited = busy = 0.0
        queue = queued_bytes
        for hits, link, cpu in zip(num_hits.tolist(), num_link.tolist(), num_cpu.tolist(), strict=True):
            queue = max(0.0, queue - share * self._copy_rate)
            gpu_ms, cpu_ms, queue = self._lanes(hits, link, cpu, queue)
            total += share + max(gpu_ms, cpu_ms)
            waited += max(0.0, cpu_ms - gpu_ms)
            busy += cpu_ms
        size = self.expert_bytes
        return StepTime(
            total_ms=total,
            fixed_ms=fixed,
            cpu_wait_ms=waited,
            cpu_busy_ms=busy,
            link_bytes=float(num_link.sum()) * size,
            copied_bytes=queued_bytes - queue,
            cpu_bytes=float(num_cpu.sum()) * size,
        )

    def _lanes(self, hits: int, link: float, cpu: float, queue: float) -> tuple[float, float, float]:
        """Run both lanes of one layer: (GPU end, CPU end, bytes queued after both), ms from their start."""
        to_read, to_compute = float(link * self.expert_bytes), float(cpu * self.expert_bytes)
        cpu_starts = self.profile.cpu_fixed_ms
        computed = hits + (math.ceil(link) if self.profile.is_gathered else math.ceil(link) - link)
        vram_ms = computed * self.profile.vram_expert_ms
        now = gpu_end = cpu_end = 0.0
        while to_read > _EPSILON or vram_ms > _EPSILON or to_compute > _EPSILON:
            is_reading, is_copying = to_read > _EPSILON, queue > _EPSILON
            is_computing = to_compute > _EPSILON and now >= cpu_starts - _EPSILON
            read, copy, compute = self._rates(is_reading, is_copying, is_computing)
            ends = [to_read / read] if is_reading else []
            if vram_ms > _EPSILON and (self.profile.is_gpu_overlapped or not is_reading):
                ends.append(vram_ms)
            if copy > 0.0:
                ends.append(queue / copy)
            if is_computing:
                ends.append(to_compute / compute)
            elif to_compute > _EPSILON:
                ends.append(cpu_starts - now)
            span = min(ends)
            now += span
            if is_copying:
                queue = max(0.0, queue - copy * span)
            if is_computing:
                to_compute = self._less(to_compute, compute * span)
                cpu_end = now
            if is_reading:
                to_read = self._less(to_read, read * span)
                gpu_end = now
            if vram_ms > _EPSILON and (self.profile.is_gpu_overlapped or not is_reading):
                vram_ms -= span
                gpu_end = now
        return gpu_end, cpu_end, queue

    def _rates(self, is_reading: bool, is_copying: bool, is_computing: bool) -> tuple[float, float, float]:
        """Bytes per ms of zero-copy reads, copy engine and CPU lane while these are active."""
        read = self._read_rate if is_reading else 0.0
        copy = self._copy_rate if is_copying else 0.0
        if is_reading and is_copying and self.profile.is_copy_yielding:
            copy = 0.0
        elif is_reading and is_copying:
            read = min(read, self._link_rate / 2)
            copy = min(copy, self._link_rate - read)
        compute = self._cpu_rate if is_computing else 0.0
        scale = min(1.0, self._dram_rate / max(read + copy + compute, 1.0))
        return read * scale, copy * scale, compute * scale

    @staticmethod
    def _less(left: float, done: float) -> float:
        """Take done off. Less than a byte counts as nothing, so that rounding cannot stall the clock."""
        return left - done if left - done >= 1.0 else 0.0
