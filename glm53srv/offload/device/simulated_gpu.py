"""The offload on the CPU engine: every part but the GPU is the real one.

decode layer    plan (split rule, log) -> CPU picks into the mailbox -> the other picks through a pointer
                table into slots and home, by the engine's own pool in the GPU's place -> + CPU partial
decode step     beside it the host works one step behind, as it will beside a GPU: reads the log of the
                step before, advances residency, changes the table for the next step, issues copies
prefill layer   staged slot, else resident slot, else home; no log, no heat
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import EngineError
from glm53srv.kernels import Clamp, ExpertPart, ExpertTable
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig
from glm53srv.model.linear import BATCH_INVARIANT_ROWS, KernelContext, to_matrix
from glm53srv.model.ops import F32
from glm53srv.model.tensor_needs import layer_prefix, mlp_needs
from glm53srv.offload.calibrate import Calibration, assume, calibrate, describe
from glm53srv.offload.cost import Parts, default_costs
from glm53srv.offload.cost_ledger import CostLedger
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.decode_step import DecodeStep
from glm53srv.offload.device.describe import describe_offload
from glm53srv.offload.device.heat_keeper import HeatKeeper
from glm53srv.offload.device.layout import sparse_layers
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.simulated_probes import SimulatedProbes
from glm53srv.offload.device.slots import SlotStore
from glm53srv.offload.device.staged_chunk import StagedChunk
from glm53srv.offload.elastic import ElasticLoan, loan_slots
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.offers import keep_picks
from glm53srv.offload.report import OffloadCounts, OffloadReport
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.split import Lane, Split, split_picks
from glm53srv.offload.staging import should_stage
from glm53srv.offload.vram_plan import VramPlan, plan_vram
from glm53srv.offload.warm_fill import fill_from_history

logger = logging.getLogger(__name__)

MAX_SETTLING_ADVANCES = 4
"""Advances after which called slots must be lent when no step runs: unmap, end of draining, and two spare."""


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
        *,
        fingerprint: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build everything around a filled arena: measure the costs, fill the cache from kept heat.

        fingerprint: of the routers, see model/fingerprint.py. clock: seconds. Raises MachineError.
        """
        geometry = arena.geometry
        self._clock = clock
        self._context = context
        self._config = config
        self._options = options
        self._rows = min(max_rows, BATCH_INVARIANT_ROWS)
        self.arena = arena
        self.plan = plan_slots(geometry, options)
        self.policy = ResidencyPolicy(geometry, self.plan.num_slots, options.residency)
        self._counts = Counts()
        self._store = SlotStore(arena, self.plan.num_slots)
        self._loan = ElasticLoan(self.plan)
        self._chunk: StagedChunk | None = None
        self._log: DecodeStep | None = None  # of the decode step before, until it is read
        self._head = 0  # number of the next offer, as a device has it
        self._step: DecodeStep | None = None
        self._mailbox = Mailbox(MailboxShape(self._rows, geometry.top_k, config.hidden_size))
        self._crew = self._hire(self._mailbox)
        self._hand_over_ms = 0.0
        self._decode_began_s: float | None = None
        self._heat = HeatKeeper(options.heat, geometry, fingerprint)
        try:
            calibration = self._calibrate()
            max_picks = self._rows * geometry.top_k
            # Nothing lands here: what comes over the link is read where it lies, and any of it can be shared.
            parts = Parts(arena.layout.num_parts, max_picks if options.splits_experts else 0)
            self._ledger = CostLedger(calibration, options.costs, max_picks, options.mode, parts)
            self._fill_cache()
            self._report = self._describe()
        except BaseException:
            self._crew.close()  # its threads would outlive what they read
            raise

    @property
    def counts(self) -> OffloadCounts:
        """What happened so far."""
        return self._counts.frozen()

    @property
    def report(self) -> OffloadReport:
        """The snapshot that the last step or chunk left. May be read by any thread: it is replaced whole."""
        return self._report

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
        if shrink:  # with the last step's log read, since no step follows that would do it
            self._learn()
        self.policy.shrink(shrink)
        self._counts.num_loans += shrink > 0
        self._settle()
        if is_staged and loan >= 2 * plan.stage_slots:
            self._chunk = StagedChunk(self.policy, self._store, plan)

    def end_chunk(self, is_more_waiting: bool) -> None:
        """End a chunk, finished or not, and give the loan back unless another chunk follows at once."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.abort()
            self._counts.num_staged += chunk.num_staged
        self.policy.grow(self._loan.end(is_more_waiting).grow)
        self._report = self._describe()

    def begin_decode(self, num_rows: int) -> None:
        """Begin a decode step of num_rows: the table is fixed for it, and the host works beside it."""
        if not 1 <= num_rows <= self._rows:
            raise EngineError(f"a decode step of {num_rows} rows, the mailbox holds {self._rows}")
        geometry = self.policy.geometry
        log = np.full((geometry.num_layers, num_rows * geometry.top_k), -1, np.int32)
        heat, cpu_count, offers = self.policy.heat_table(), self._ledger.table, self._store.offers
        self._step = DecodeStep(self._store.true_table.copy(), heat, cpu_count, offers, log, log.copy())
        self._store.begin_step()
        self._crew.ring()
        begin_s, before_s = self._clock(), self._decode_began_s
        self._decode_began_s = begin_s
        granted = self._ledger.grant(0.0 if before_s is None else (begin_s - before_s) * 1e3)
        if self._learn():
            fixed = self._options.copies_per_step
            num_admitted = self._advance(granted if fixed is None else fixed)
            if fixed is None:
                self._ledger.spend(num_admitted)

    def end_decode(self) -> None:
        """End the step: its log is read beside the next one; copies that ran beside it have landed."""
        assert self._step is not None
        assert self._decode_began_s is not None
        self._log, self._step = self._step, None
        self._store.end_step()
        step_ms = (self._clock() - self._decode_began_s) * 1e3
        fixed = self._options.copies_per_step
        self._store.move(max(1, int(step_ms / self._ledger.copy_ms)) if fixed is None else fixed)
        self._crew.check()
        self._counts.num_steps += 1
        self._ledger.end_step()
        self._report = self._describe()

    def close(self) -> None:
        """Save the heat and end the workers. Idempotent."""
        self._heat.close(self.policy.history)
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
        step: DecodeStep,
        layer: int,
        table: ExpertTable,
        x: F32,
        picks: NDArray[np.int32],
        weights: F32,
    ) -> F32:
        """Run one layer of a decode step; picks (rows, top_k + 1), the last is the shared expert."""
        routed = picks[:, :-1]
        one = slice(layer, layer + 1)
        parts = self.arena.layout.num_parts
        picked = routed.reshape(1, -1)
        split = split_picks(picked, step.table[one], step.heat[one], step.cpu_count, num_parts=parts)
        step.log[layer] = routed.reshape(-1)
        self._keep(step, layer, split)
        self._counts.num_vram += int(split.num_hits[0])
        self._counts.num_link += int(split.num_link[0])
        self._counts.num_cpu += int(split.num_cpu[0])
        self._counts.num_split += int(split.share[0] > 0)
        self._counts.num_picks += routed.size
        self._counts.num_hit_picks += int((split.lanes[0] == Lane.VRAM).sum())
        is_cpu = (split.lanes[0] == Lane.CPU).reshape(routed.shape)
        is_split = (split.lanes[0] == Lane.SPLIT).reshape(routed.shape)
        if not (is_cpu | is_split).any():
            return self._launch(step, layer, table, x, picks, weights, split)
        on_cpu, on_gpu = self._parts(routed[is_split], split)
        posted = np.where(is_cpu | is_split, routed, np.int32(-1))
        seq = self._crew.post(layer, x, posted, weights[:, :-1], on_cpu)
        others = picks.copy()
        others[:, :-1][is_cpu] = -1
        y = self._launch(step, layer, table, x, others, weights, split, on_gpu)
        y += self._crew.wait(seq, len(x))
        answer = self._mailbox.answer(seq)
        num_experts = answer.num_blocks / self.arena.layout.num_blocks
        self._ledger.observe_cpu([(num_experts, answer.elapsed_ms + self._hand_over_ms)])
        return y

    def _parts(self, shared: NDArray[np.int32], split: Split) -> tuple[ExpertPart | None, ExpertPart | None]:
        """Give what CPU and GPU compute of the shared expert; shared: its picks, all of one expert."""
        if not shared.size:
            return None, None
        num_blocks = self.arena.layout.num_blocks
        cut = int(split.share[0]) * num_blocks // split.num_parts
        return ExpertPart(int(shared[0]), 0, cut), ExpertPart(int(shared[0]), cut, num_blocks)

    def _keep(self, step: DecodeStep, layer: int, split: Split) -> None:
        """Let experts of the link take what is offered; they are then read from their slots."""
        if step.offers is None:
            return
        one = slice(layer, layer + 1)
        picks = step.log[one]
        keeping = keep_picks(picks, split, step.table[one], step.heat[one], step.offers, self._head)
        self._head = keeping.head
        step.kept[one] = keeping.slots
        place = np.flatnonzero(keeping.slots[0] >= 0)
        experts, slots = picks[0, place], keeping.slots[0, place]
        self._store.keep(layer, experts, slots)
        step.table[layer, experts] = slots

    def _learn(self) -> bool:
        """Read the log of the decode step before, once; tells whether there was one."""
        log, self._log = self._log, None
        if log is None:
            return False
        self.policy.observe(log.log, log.kept)
        self._counts.num_kept += int((log.kept >= 0).sum())
        self._heat.end_step(self.policy.history)
        return True

    def _launch(
        self,
        step: DecodeStep,
        layer: int,
        table: ExpertTable,
        x: F32,
        picks: NDArray[np.int32],
        weights: F32,
        split: Split,
        part: ExpertPart | None = None,
    ) -> F32:
        """Compute the GPU's part of a decode layer, and learn what it takes.

        The shared expert lies at home like a read in place, but in memory that every step reads: counted as a
        hit.
        """
        begin_s = self._clock()
        y = self._compute(layer, table, step.table[layer], x, picks, weights, part)
        elapsed_ms = (self._clock() - begin_s) * 1e3
        zeros = float(split.share[0]) / split.num_parts  # computed with the rest, though the CPU's
        self._ledger.observe_gpu(
            [(float(split.num_hits[0]) + 1 + zeros, float(split.link_load[0]), elapsed_ms)]
        )
        return y

    def _compute(
        self,
        layer: int,
        table: ExpertTable,
        slots: NDArray[np.int32],
        x: F32,
        picks: NDArray[np.int32],
        weights: F32,
        part: ExpertPart | None = None,
    ) -> F32:
        """Do what the GPU's kernels do: read every picked expert through the pointer table."""
        layout = self.arena.layout
        pointed = table.moved(self._store.addresses(layer, slots), layout.offsets)
        context = self._context
        return context.pool.experts(
            x, pointed, picks, weights, self._config.swiglu_limit, precision=context.precision, part=part
        )

    def _advance(self, max_admissions: int) -> int:
        """Decide and carry out what changes before the next step; gives the number of admissions."""
        update = self.policy.advance(self._store.take_landed(), max_admissions)
        self._store.apply(update)
        self._counts.num_copies += len(update.copy_keys)
        return update.num_admitted

    def _calibrate(self) -> Calibration:
        """Measure the lanes, or take the defaults if no time is allowed for it."""
        options, geometry = self._options, self.policy.geometry
        guess = default_costs(options.crew_threads)
        if options.calibrate_s <= 0:
            return assume(guess, options.costs)
        lanes = SimulatedProbes(
            self.arena, self._store, self._crew, self._mailbox, self._compute, self._clock
        )
        found = calibrate(
            lanes.probes(),
            self._clock,
            guess=guess,
            overrides=options.costs,
            budget_s=options.calibrate_s,
            max_experts=geometry.top_k,
        )
        self._hand_over_ms = lanes.hand_over_ms
        for line in describe(found, geometry.expert_bytes):
            logger.info("offload %s", line)
        return found

    def _fill_cache(self) -> None:
        """Fill the cache from the heat of an earlier run."""
        history = self._heat.load()
        if history is None:
            return

        def execute(update: ResidencyUpdate) -> NDArray[np.int32]:
            self._store.apply(update)
            self._store.drain()
            return self._store.take_landed()

        num_copied = fill_from_history(self.policy, history, execute)
        self._counts.num_copies += num_copied
        logger.info("offload warm slots=%d of %d", num_copied, self.plan.num_slots)

    def _describe(self) -> OffloadReport:
        counts, crew = self._counts, self._crew.stats()
        return describe_offload(
            "simulate", self._options, self.policy, counts, self._ledger, self._heat, crew
        )

    def _settle(self) -> None:
        """Wait until called slots are lent; no step is running, so copies and unmapping cannot be in use."""
        for _ in range(MAX_SETTLING_ADVANCES):
            if self._loan.poll(self.policy.is_lent):
                return
            self._store.drain()
            self._advance(0)
        raise EngineError("slots called for a prefill were not lent: residency is stuck")

    def _hire(self, mailbox: Mailbox) -> Crew:
        options, context = self._options, self._context
        crew = CrewOptions(
            options.crew_threads,
            options.crew_cpus,
            context.pool.isa,
            context.precision,
            Clamp.GATE,  # as the engine's own experts; a GPU's kernels clamp the activation
            self._config.swiglu_limit,
            deadline_ms=options.deadline_ms,
        )
        return Crew(self.arena, mailbox, crew)


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
    vram = replace(options.vram, landing=0, ahead=0)
    num_slots = vram.max_slots or max(2, geometry.num_keys // 8)
    chunk_slots = options.chunk_slots or max(1, num_slots // 8)
    free_bytes = vram.reserve_bytes(options.mode) + num_slots * geometry.expert_bytes
    return plan_vram(geometry, free_bytes, options.mode, vram, chunk_slots)
