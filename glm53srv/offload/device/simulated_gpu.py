"""The offload on the CPU engine: every part but the GPU is the real one.

decode layer    plan (split rule, log) -> CPU picks into the mailbox -> the other picks through a pointer
                table into slots and home, by the engine's own pool in the GPU's place -> + CPU partial
decode step     beside it the host works one step behind, as it will beside a GPU: reads the log of the
                step before, advances residency, changes the table for the next step, issues copies
prefill layer   staged slot, else resident slot, else home; no log, no heat
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import EngineError
from glm53srv.kernels import Clamp, ExpertTable
from glm53srv.machine import read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig
from glm53srv.model.linear import BATCH_INVARIANT_ROWS, KernelContext, to_matrix
from glm53srv.model.loading import ExpertSource
from glm53srv.model.ops import F32
from glm53srv.model.tensor_needs import layer_prefix, mlp_needs
from glm53srv.offload.cost import cpu_count_table, default_costs
from glm53srv.offload.device.arena import ExpertArena, require_memory
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.layout import plan_records, sparse_layers
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.slots import SlotStore
from glm53srv.offload.device.staged_chunk import StagedChunk
from glm53srv.offload.elastic import ElasticLoan, loan_slots
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.split import Lane, split_picks
from glm53srv.offload.staging import should_stage
from glm53srv.offload.vram_plan import VramPlan, plan_vram
from glm53srv.progress import Progress

logger = logging.getLogger(__name__)

FILL_BEGIN, FILL_SHARE = 0.1, 0.049
"""The arena's part of the decoder's progress: between its checks, at 0.1, and its layers, from 0.15 on."""

MAX_SETTLING_ADVANCES = 4
"""Advances after which called slots must be lent when no step runs: unmap, end of draining, and two spare."""


@dataclass(slots=True)
class OffloadCounts:
    """What happened since the start. Distinct experts per layer and lane; copies in experts."""

    num_steps: int = 0
    num_vram: int = 0
    num_link: int = 0
    num_cpu: int = 0
    num_copies: int = 0
    num_staged: int = 0
    num_loans: int = 0


class SimulatedOffload:
    """Owns arena, slots, residency, loan and crew. Every call comes from the engine thread.

    The engine brackets its work: begin_chunk .. end_chunk around the layers of a prefill chunk (decode steps
    may come in between), begin_decode .. end_decode around the layers of a decode step. Outside of both, as
    during warm-up, experts are read where they are, and nothing is learnt.
    """

    def __init__(
        self,
        context: KernelContext,
        config: ModelConfig,
        arena: ExpertArena,
        max_rows: int,
        options: OffloadOptions,
    ) -> None:
        """Build everything around a filled arena. Raises MachineError."""
        geometry = arena.geometry
        self._context = context
        self._config = config
        self._options = options
        self._rows = min(max_rows, BATCH_INVARIANT_ROWS)
        self.arena = arena
        self.plan = plan_slots(geometry, options)
        self.policy = ResidencyPolicy(geometry, self.plan.num_slots, options.residency)
        self.counts = OffloadCounts()
        self._store = SlotStore(arena, self.plan.num_slots)
        self._loan = ElasticLoan(self.plan)
        self._chunk: StagedChunk | None = None
        self._log: NDArray[np.int32] | None = None  # of the decode step before
        self._step: _DecodeStep | None = None
        max_picks = self._rows * geometry.top_k
        costs = options.costs.apply(default_costs(options.crew_threads))
        self._cpu_count = cpu_count_table(costs, max_picks, options.mode)
        self._crew = self._hire()

    def layer(self, checkpoint: Checkpoint, sparse_layer: int) -> OffloadedExperts:
        """Give the routed and the shared expert of a layer, as the model calls them."""
        config = self._config
        prefix = f"{layer_prefix(sparse_layers(config)[sparse_layer])}.mlp.shared_experts"
        needs = mlp_needs(prefix, config.hidden_size, config.moe.expert_size)
        gate, up, down = (to_matrix(checkpoint.quantized(need)) for need in needs)
        table = ExpertTable([*self.arena.experts(sparse_layer), (gate, up, down)])
        return OffloadedExperts(self, sparse_layer, table)

    def begin_chunk(self, num_tokens: int) -> None:
        """Borrow slots for a prefill chunk and begin to stage it, if it is long enough."""
        geometry, plan = self.policy.geometry, self.plan
        is_staged = plan.stage_slots > 0 and should_stage(
            num_tokens, geometry.top_k, self._options.min_picks(geometry.num_experts)
        )
        loan = loan_slots(plan, geometry.expert_bytes, num_tokens, is_staged)
        shrink = self._loan.begin(loan).shrink
        self.policy.shrink(shrink)
        self.counts.num_loans += shrink > 0
        self._settle()
        if is_staged and loan >= 2 * plan.stage_slots:
            self._chunk = StagedChunk(self.policy, self._store, plan)

    def end_chunk(self, is_more_waiting: bool) -> None:
        """End a chunk, finished or not, and give the loan back unless another chunk follows at once."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.abort()
            self.counts.num_staged += chunk.num_staged
        self.policy.grow(self._loan.end(is_more_waiting).grow)

    def begin_decode(self, num_rows: int) -> None:
        """Begin a decode step of num_rows: the table is fixed for it, and the host works beside it."""
        if not 1 <= num_rows <= self._rows:
            raise EngineError(f"a decode step of {num_rows} rows, the mailbox holds {self._rows}")
        geometry = self.policy.geometry
        log = np.full((geometry.num_layers, num_rows * geometry.top_k), -1, np.int32)
        self._step = _DecodeStep(self._store.table.copy(), self.policy.heat_table(), log)
        self._crew.ring()
        if self._log is not None:
            self.policy.observe(self._log)
            self._advance(self._options.copies_per_step)

    def end_decode(self) -> None:
        """End the step: its log is read beside the next one; copies that ran beside it have landed."""
        assert self._step is not None
        self._log, self._step = self._step.log, None
        self._store.move(self._options.copies_per_step)
        self._crew.check()
        self.counts.num_steps += 1

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._crew.close()
        self.arena.close()

    def run_layer(
        self, layer: int, table: ExpertTable, x: F32, picks: NDArray[np.int32], weights: F32
    ) -> F32:
        """Compute a layer's experts in the way that the running step or chunk asks for."""
        if self._step is not None:
            return self._decode(self._step, layer, table, x, picks, weights)
        chunk = self._chunk
        if chunk is None:
            return self._compute(layer, table, self._store.table[layer], x, picks, weights)
        y = self._compute(layer, table, chunk.begin_layer(layer), x, picks, weights)
        chunk.end_layer(layer)
        return y

    def _decode(
        self,
        step: _DecodeStep,
        layer: int,
        table: ExpertTable,
        x: F32,
        picks: NDArray[np.int32],
        weights: F32,
    ) -> F32:
        """Run one layer of a decode step; picks (rows, top_k + 1), the last is the shared expert."""
        routed = picks[:, :-1]
        one = slice(layer, layer + 1)
        split = split_picks(routed.reshape(1, -1), step.table[one], step.heat[one], self._cpu_count)
        step.log[layer] = routed.reshape(-1)
        self.counts.num_vram += int(split.num_hits[0])
        self.counts.num_link += int(split.num_link[0])
        self.counts.num_cpu += int(split.num_cpu[0])
        is_cpu = (split.lanes[0] == Lane.CPU).reshape(routed.shape)
        if not is_cpu.any():
            return self._compute(layer, table, step.table[layer], x, picks, weights)
        seq = self._crew.post(layer, x, np.where(is_cpu, routed, np.int32(-1)), weights[:, :-1])
        others = picks.copy()
        others[:, :-1][is_cpu] = -1
        y = self._compute(layer, table, step.table[layer], x, others, weights)
        y += self._crew.wait(seq, len(x))
        return y

    def _compute(
        self,
        layer: int,
        table: ExpertTable,
        slots: NDArray[np.int32],
        x: F32,
        picks: NDArray[np.int32],
        weights: F32,
    ) -> F32:
        """Do what the GPU's kernels do: read every picked expert through the pointer table."""
        layout = self.arena.layout
        pointed = table.moved(self._store.addresses(layer, slots), layout.offsets)
        context = self._context
        return context.pool.experts(
            x, pointed, picks, weights, self._config.swiglu_limit, precision=context.precision
        )

    def _advance(self, max_admissions: int) -> None:
        update = self.policy.advance(self._store.take_landed(), max_admissions)
        self._store.apply(update)
        self.counts.num_copies += len(update.copy_keys)

    def _settle(self) -> None:
        """Wait until called slots are lent; no step is running, so copies and unmapping cannot be in use."""
        for _ in range(MAX_SETTLING_ADVANCES):
            if self._loan.poll(self.policy.is_lent):
                return
            self._store.drain()
            self._advance(0)
        raise EngineError("slots called for a prefill were not lent: residency is stuck")

    def _hire(self) -> Crew:
        options, context, geometry = self._options, self._context, self.policy.geometry
        shape = MailboxShape(self._rows, geometry.top_k, self._config.hidden_size)
        crew = CrewOptions(
            options.crew_threads,
            options.crew_cpus,
            context.pool.isa,
            context.precision,
            Clamp.GATE,  # as the engine's own experts; a GPU's kernels clamp the activation
            self._config.swiglu_limit,
            deadline_ms=options.deadline_ms,
        )
        return Crew(self.arena, Mailbox(shape), crew)


class OffloadOpener:
    """Builds the offload when the decoder's loader has found the checkpoint whole, and remembers it."""

    def __init__(
        self, context: KernelContext, max_rows: int, options: OffloadOptions, progress: Progress | None
    ) -> None:
        self._context = context
        self._max_rows = max_rows
        self._options = options
        self._progress = progress or (lambda fraction, stage: None)
        self.offload: SimulatedOffload | None = None

    def __call__(self, checkpoint: Checkpoint, config: ModelConfig) -> ExpertSource:
        """Fill the arena and give the experts of its layers. Raises CheckpointError or MachineError."""
        machine = read_machine()
        layout, geometry = plan_records(checkpoint, config)
        plan = plan_slots(geometry, self._options)
        require_memory(layout.record_bytes * (geometry.num_keys + plan.num_slots), machine)
        progress = self._progress
        arena = ExpertArena.load(
            checkpoint,
            config,
            machine,
            progress=lambda part, stage: progress(FILL_BEGIN + FILL_SHARE * part, stage),
        )
        self.offload = SimulatedOffload(self._context, config, arena, self._max_rows, self._options)
        return self.offload.layer

    def close(self) -> None:
        """Close what was built so far."""
        if self.offload is not None:
            self.offload.close()


class OffloadedExperts:
    """The experts of one layer; stands where the model has them all in one table."""

    def __init__(self, offload: SimulatedOffload, layer: int, table: ExpertTable) -> None:
        self._offload = offload
        self._layer = layer
        self._table = table

    def __call__(self, x: F32, picks: NDArray[np.int32], weights: F32) -> F32:
        """Sum weights (rows, k + 1) times the experts picks (rows, k + 1) of x (rows, hidden)."""
        return self._offload.run_layer(self._layer, self._table, x, picks, weights)


def plan_slots(geometry: ExpertGeometry, options: OffloadOptions) -> VramPlan:
    """Divide the cache of a simulated GPU; see OffloadOptions.vram. Raises MachineError."""
    vram = options.vram
    num_slots = vram.max_slots or max(2, geometry.num_keys // 8)
    chunk_slots = options.chunk_slots or max(1, num_slots // 8)
    free_bytes = vram.reserve_bytes(options.mode) + num_slots * geometry.expert_bytes
    return plan_vram(geometry, free_bytes, options.mode, vram, chunk_slots)


@dataclass(frozen=True, slots=True)
class _DecodeStep:
    """What a running step reads and writes. table, heat: int32 (layers, experts), fixed while it runs.

    log: int32 (layers, rows * top_k), its picks.
    """

    table: NDArray[np.int32]
    heat: NDArray[np.int32]
    log: NDArray[np.int32]
