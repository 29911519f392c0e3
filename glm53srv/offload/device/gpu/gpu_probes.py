"""How the lanes of a real GPU are timed: the package's own decode kernel over chosen experts of one layer."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from glm53srv.offload.calibrate import CostProbes
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload

RunExperts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A sparse layer's decode kernel for one row: (layer, x (1, hidden), picks (1, k), weights (1, k)); a weight
of 0 skips its pick."""


class GpuProbes:
    """Times one lane at a time, each job on other experts than the last. Engine thread, before any step.

    The slots must be free: what they hold is overwritten, and what is computed from them has no meaning.
    """

    def __init__(self, offload: GpuOffload, run: RunExperts, lane: CpuLane | None) -> None:
        geometry, device = offload.policy.geometry, offload.store.device_table.device
        self._offload = offload
        self._run = run
        self._lane = lane
        self._geometry = geometry
        self._device = device
        hidden = offload.arena.layout.hidden
        self._x = torch.randn(
            (1, hidden), generator=torch.Generator(device).manual_seed(0), device=device
        ).half()
        self._next = 0

    def probes(self) -> CostProbes:
        """Give the timers; without workers the CPU's is that of no job at all."""
        cpu = self._no_cpu if self._lane is None else self._cpu
        return CostProbes(cpu=cpu, link=self._link, vram=self._vram, copy=self._copy)

    @staticmethod
    def _no_cpu(num_experts: int) -> float:
        return 0.0

    def _cpu(self, num_experts: int) -> float:
        assert self._lane is not None
        layer, experts = self._take(num_experts)
        return self._lane.run_alone(layer, self._x.float().cpu().numpy(), experts)

    def _link(self, num_experts: int) -> float:
        layer, experts = self._take(num_experts)
        return self._time(layer, experts, np.full(self._geometry.num_experts, -1, np.int32), lands=True)

    def _vram(self, num_experts: int) -> float:
        layer, experts = self._take(num_experts)
        slots = np.full(self._geometry.num_experts, -1, np.int32)
        slots[experts] = (self._next + np.arange(num_experts)) % self._offload.plan.num_slots
        return self._time(layer, experts, slots)

    def _copy(self, num_experts: int) -> float:
        layer, experts = self._take(num_experts)
        keys = (layer * self._geometry.num_experts + experts).astype(np.int32)
        slots = ((self._next + np.arange(num_experts)) % self._offload.plan.num_slots).astype(np.int32)
        torch.cuda.synchronize(self._device)
        begin_s = time.perf_counter()
        self._offload.store.wait(self._offload.store.stage(keys, slots))
        self._offload.store.drain()
        return (time.perf_counter() - begin_s) * 1e3

    def _time(self, layer: int, experts: np.ndarray, slots: np.ndarray, *, lands: bool = False) -> float:
        """Time the kernel over `experts`, other picks skipped by their weight; lands: and their copies."""
        k = self._geometry.top_k
        others = np.setdiff1d(np.arange(self._geometry.num_experts), experts)[: k - len(experts)]
        picks = torch.from_numpy(np.concatenate([experts, others])[None].astype(np.int64)).to(self._device)
        weights = torch.zeros((1, k), dtype=torch.float16, device=self._device)
        weights[0, : len(experts)] = 0.1
        offload = self._offload
        offload.layers.point(layer, torch.from_numpy(slots).to(self._device))
        if lands:
            self._land(layer, experts)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        begin.record()
        if lands:
            offload.layers.gather()
        self._run(layer, self._x, picks, weights)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _land(self, layer: int, experts: np.ndarray) -> None:
        """Point a layer's tables at the buffers of its experts, and list their copies, as a plan does."""
        offload, layout = self._offload, self._offload.arena.layout
        landing, tables = offload.layers.landing, offload.layers.tables[layer]
        count = min(len(experts), landing.num_experts)
        own = torch.from_numpy(experts[:count].astype(np.int64)).to(self._device)
        targets = landing.address + layout.record_bytes * torch.arange(count, device=self._device)
        for table, offset in zip((tables.gate, tables.up, tables.down), layout.offsets, strict=True):
            table[own] = targets + offset
        landing.sources[:count] = offload.layers.home(layer) + layout.record_bytes * own
        landing.targets[:count] = targets
        landing.count.fill_(count)
        landing.skips.zero_()
        landing.mask.zero_()

    def _take(self, num_experts: int) -> tuple[int, np.ndarray]:
        """Give a layer and experts that were not used lately: int (num_experts,)."""
        geometry = self._geometry
        self._next += num_experts
        layer = self._next // geometry.num_experts % geometry.num_layers
        return layer, (self._next + np.arange(num_experts)) % geometry.num_experts
