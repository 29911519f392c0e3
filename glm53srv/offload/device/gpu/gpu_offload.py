"""The offload on a GPU: plans in the stream, policy on the host one step behind, copies beside both.

decode layer    plan kernel (split, log, job for the CPU, pointers) -> experts -> wait, add the CPU's part
decode step     once its kernels are enqueued the host reads the log of the step before, advances residency,
                issues copies, and enqueues the table's changes behind the step
prefill layer   pointers of all experts: staged slot, else resident slot, else home; no log, no heat
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.errors import EngineError
from glm53srv.offload.copy_budget import CopyBudget, CopyBudgetParams
from glm53srv.offload.cost import CostModel, Mode, cpu_count_table
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.gpu_slots import GpuSlots
from glm53srv.offload.device.gpu.launch import PlanInputs, PlanOutputs
from glm53srv.offload.device.gpu.plan_kernel import launch_plan, launch_point
from glm53srv.offload.device.staged_chunk import StagedChunk
from glm53srv.offload.elastic import ElasticLoan, LoanParams, loan_slots
from glm53srv.offload.residency import ResidencyParams, ResidencyPolicy
from glm53srv.offload.split import Lane
from glm53srv.offload.staging import should_stage
from glm53srv.offload.vram_plan import VramPlan

logger = logging.getLogger(__name__)

MAX_SETTLING_ADVANCES = 6
"""Advances after which called slots must be lent when no step runs: unmap, drained, landed, spare."""


@dataclass(frozen=True, slots=True)
class GpuOffloadOptions:
    """mode: "exact" sends nothing to the CPU. plan: division of the VRAM. loan: what activations take.

    stage_min_picks: picks per layer from which a chunk is staged. link_share: part of the link's time that
    admissions may take. poisons: see GpuSlots.
    """

    mode: Mode
    plan: VramPlan
    loan: LoanParams
    costs: CostModel
    copy_ms: float
    stage_min_picks: int
    residency: ResidencyParams
    link_share: float = 0.25
    poisons: bool = False


@dataclass(slots=True)
class OffloadCounts:
    """What happened since the start: distinct experts per layer and lane, all picks and those that hit,
    copies in experts."""

    num_steps: int = 0
    num_vram: int = 0
    num_link: int = 0
    num_cpu: int = 0
    num_picks: int = 0
    num_hit_picks: int = 0
    num_copies: int = 0
    num_staged: int = 0
    num_loans: int = 0


@dataclass(frozen=True, slots=True)
class LayerTables:
    """A sparse layer's pointer tables in the package: int64 (experts,) each, on the device, never moved."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class GpuOffload:
    """Owns slots, residency, loan and plans. Every call comes from the engine thread, on its main stream.

    The engine brackets its work as engine/expert_steps.py says; the sparse layers call plan, begin_layer,
    end_layer and combine from inside.
    """

    def __init__(
        self,
        arena: ExpertArena,
        alias: torch.Tensor,
        tables: list[LayerTables],
        max_rows: int,
        options: GpuOffloadOptions,
        lane: CpuLane | None = None,
    ) -> None:
        """Allocate around a filled, registered arena. alias: its bytes on the device. lane: the CPU workers,
        in fast mode. Raises torch.OutOfMemoryError."""
        geometry = arena.geometry
        device = alias.device
        self.arena = arena
        self.options = options
        self.plan = options.plan
        self.policy = ResidencyPolicy(geometry, self.plan.num_slots, options.residency)
        self.counts = OffloadCounts()
        self.store = GpuSlots(
            arena, self.plan.num_slots, self.plan.chunk_slots, device, poisons=options.poisons
        )
        self.lane = lane
        self._device = device
        self._base = int(alias.data_ptr())
        self._tables = tables
        self._loan = ElasticLoan(self.plan)
        self._budget = CopyBudget(CopyBudgetParams(options.link_share, options.copy_ms))
        self._chunk: StagedChunk | None = None
        width = max_rows * geometry.top_k
        layers = geometry.num_layers
        self._log = torch.full((layers, width), -1, dtype=torch.int32, device=device)
        self._lanes = torch.zeros((layers, width), dtype=torch.int8, device=device)
        self._counts = torch.zeros((layers, 3), dtype=torch.int32, device=device)
        self._heat = torch.zeros((layers, geometry.num_experts), dtype=torch.int32, device=device)
        table = cpu_count_table(options.costs, width, options.mode if lane is not None else "exact")
        self._cpu_count = torch.from_numpy(table).to(device)
        self._logs = _HostLogs(self._log, self._lanes, self._counts)
        self._rows = 0

    # ---- brackets of the engine ----

    def begin_chunk(self, num_tokens: int) -> None:
        """Borrow slots for a prefill chunk and begin to stage it, if it is long enough."""
        geometry, plan = self.policy.geometry, self.plan
        is_staged = plan.stage_slots > 0 and should_stage(
            num_tokens, geometry.top_k, self.options.stage_min_picks
        )
        loan = loan_slots(plan, geometry.expert_bytes, num_tokens, is_staged, self.options.loan)
        shrink = self._loan.begin(loan).shrink
        self.policy.shrink(shrink)
        if shrink:
            self.counts.num_loans += 1
            self._settle()
        staged = 2 * plan.stage_slots if is_staged else 0
        if is_staged and self.policy.num_slots - self.policy.capacity >= staged:
            self._chunk = StagedChunk(self.policy, self.store, plan)
        if shrink:
            self.store.lend(range(self.policy.capacity + staged, self.policy.num_slots))

    def end_chunk(self, is_more_waiting: bool) -> None:
        """End a chunk, finished or not, and give the loan back unless another chunk follows at once."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.abort()
            self.counts.num_staged += chunk.num_staged
        grow = self._loan.end(is_more_waiting).grow
        if grow:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # the chunk's activations: they are the slots' memory
            self.store.take_back(range(self.policy.capacity, self.policy.num_slots))
            self.policy.grow(grow)

    def begin_decode(self, num_rows: int) -> None:
        """Begin a decode step: what the layers plan from here on belongs to it."""
        self._rows = num_rows
        if self.lane is not None:
            self.lane.begin_step()

    def end_decode(self, step_ms: float) -> None:
        """End the enqueueing of a step: send its log on its way, and do the host's work beside it.

        step_ms: time of the step before, what the copy budget grants by.
        """
        is_fast = self.lane is not None
        done = self._logs.swap(self._rows * self.policy.geometry.top_k)
        self._rows = 0
        if done is not None:
            self._learn(done)
        granted = self._budget.grant(step_ms)
        update = self.policy.advance(self.store.take_landed(), granted)
        self._budget.spend(update.num_admitted)
        self.store.apply(update)
        self.counts.num_copies += len(update.copy_keys)
        if is_fast and done is not None:
            self._heat.copy_(torch.from_numpy(self.policy.heat_table()).pin_memory(), non_blocking=True)
        self.counts.num_steps += 1

    def check(self) -> None:
        """Raise EngineError if the CPU workers failed; after the step's end was waited for."""
        if self.lane is not None:
            self.lane.check()

    def close(self) -> None:
        """Free everything; the device must be idle. Idempotent."""
        self.store.close()
        if self.lane is not None:
            self.lane.close()

    # ---- called by the sparse layers, inside the brackets ----

    def begin_layer(self, layer: int, num_rows: int) -> None:
        """Point a prefill layer's tables, before its router."""
        if self._rows:
            return
        slots = self.store.device_table[layer]
        if self._chunk is not None:
            chosen = self._chunk.begin_layer(layer)
            slots = torch.from_numpy(chosen).pin_memory().to(self._device, non_blocking=True)
        launch_point(slots, self.store.addresses, self._outputs(layer, 0), self._home(layer), self._layout)

    def plan_layer(self, layer: int, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        """Plan a decode layer behind its router; weights is changed in place."""
        if not self._rows:
            return
        geometry = self.policy.geometry
        cell = self.lane.next_cell() if self.lane is not None else None
        offsets = self.arena.layout.offsets
        inputs = PlanInputs(
            picks=picks,
            weights=weights,
            x=x,
            slots=self.store.device_table[layer],
            heat=self._heat[layer],
            cpu_count=self._cpu_count,
            slot_addresses=self.store.addresses,
            home=self._home(layer),
            layer=layer,
            record_bytes=self.arena.layout.record_bytes,
            up_offset=offsets[1],
            down_offset=offsets[2],
        )
        launch_plan(inputs, self._outputs(layer, self._rows * geometry.top_k), cell)
        if self.lane is not None:
            self.lane.publish()

    def combine(self, layer: int, out: torch.Tensor) -> None:
        """Add the CPU's part to a decode layer's sum, float32 (rows, hidden), behind a wait for it."""
        if self._rows and self.lane is not None:
            self.lane.combine(out, self._counts[layer])

    def end_layer(self, layer: int) -> None:
        """Issue the copies of the layer after next, behind a prefill layer's kernels."""
        if not self._rows and self._chunk is not None:
            self._chunk.end_layer(layer)

    # ---- inside ----

    @property
    def _layout(self) -> tuple[int, int, int]:
        layout = self.arena.layout
        return layout.record_bytes, layout.offsets[1], layout.offsets[2]

    def _home(self, layer: int) -> int:
        geometry = self.policy.geometry
        return self._base + layer * geometry.num_experts * self.arena.layout.record_bytes

    def _outputs(self, layer: int, width: int) -> PlanOutputs:
        tables = self._tables[layer]
        return PlanOutputs(
            tables.gate,
            tables.up,
            tables.down,
            self._log[layer, :width],
            self._lanes[layer, :width],
            self._counts[layer],
        )

    def _learn(self, done: _Log) -> None:
        counts, picks = self.counts, done.picks
        self.policy.observe(picks)
        counts.num_vram += int(done.counts[:, 0].sum())
        counts.num_link += int(done.counts[:, 1].sum())
        counts.num_cpu += int(done.counts[:, 2].sum())
        counts.num_picks += int((picks >= 0).sum())
        counts.num_hit_picks += int((done.lanes == Lane.VRAM).sum())

    def _settle(self) -> None:
        """Wait until called slots are lent: no step runs once the device is idle."""
        torch.cuda.synchronize(self._device)
        for _ in range(MAX_SETTLING_ADVANCES):
            if self._loan.poll(self.policy.is_lent):
                return
            self.store.drain()
            self.store.apply(self.policy.advance(self.store.take_landed(), 0))
        raise EngineError("slots called for a prefill were not lent: residency is stuck")


@dataclass(frozen=True, slots=True)
class _Log:
    """A step's routing log on the host: picks int32, lanes int8 (layers, picks), counts int32 (layers, 3)."""

    picks: NDArray[np.int32]
    lanes: NDArray[np.int8]
    counts: NDArray[np.int32]


class _HostLogs:
    """Two pinned copies of the device's log: one is on its way while the other is read."""

    def __init__(self, picks: torch.Tensor, lanes: torch.Tensor, counts: torch.Tensor) -> None:
        self._sources = (picks, lanes, counts)
        self._buffers = [
            tuple(torch.empty(source.shape, dtype=source.dtype).pin_memory() for source in self._sources)
            for _ in range(2)
        ]
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        self._widths = [0, 0]
        self._parity = 0

    def swap(self, width: int) -> _Log | None:
        """Enqueue the copy of the running step's log; give that of the step before, which is over."""
        now, before = self._parity, 1 - self._parity
        for target, source in zip(self._buffers[now], self._sources, strict=True):
            target.copy_(source, non_blocking=True)
        self._events[now].record()
        self._widths[now] = width
        self._parity = before
        if not self._widths[before]:
            return None
        self._events[before].synchronize()
        picks, lanes, counts = self._buffers[before]
        used = self._widths[before]
        return _Log(picks[:, :used].numpy(), lanes[:, :used].numpy(), counts.numpy())


def measure_copy_ms(
    arena_bytes: torch.Tensor, record_bytes: int, device: torch.device, count: int = 24
) -> float:
    """Measure one expert's copy to the device, in ms: the median of three rounds of `count` records.

    arena_bytes: uint8, registered host memory of at least count records.
    """
    count = max(1, min(count, arena_bytes.numel() // record_bytes))
    target = torch.empty(count * record_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(arena_bytes[: count * record_bytes], non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return float(sorted(times)[1])
