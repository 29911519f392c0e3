"""The offload on a GPU: plans in the stream, policy on the host one step behind, copies beside both.

decode layer    plan kernel (split, log, job for the CPU, pointers) -> experts of the link land in VRAM,
                fast: beside those in VRAM -> experts -> wait, add the CPU's part; beside it experts of
                the next layer, see look_ahead.py
decode step     once its kernels are enqueued the host reads the log of the step before, advances residency,
                issues copies, and enqueues the table's changes behind the step
prefill layer   pointers of all experts: staged slot, else resident slot, else home; no log, no heat
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.errors import EngineError
from glm53srv.offload.calibrate import Calibration
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.device.describe import describe_offload
from glm53srv.offload.device.gpu.chunk_loan import ChunkLoan
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.copy_kernel import USUAL, launch_gather
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.decode_buffers import DecodeBuffers
from glm53srv.offload.device.gpu.gpu_memory import GpuMemory
from glm53srv.offload.device.gpu.gpu_slots import GpuSlots
from glm53srv.offload.device.gpu.host_log import HostLogs, StepLog, read_stamps
from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.device.gpu.landing_order import LayerWork, enqueue_copies
from glm53srv.offload.device.gpu.launch import PlanInputs
from glm53srv.offload.device.gpu.look_ahead import GuessedModel, LookAhead, make_side_streams
from glm53srv.offload.device.gpu.plan_kernel import launch_plan
from glm53srv.offload.device.gpu.point_kernel import launch_point
from glm53srv.offload.device.gpu.prefill_lane import PrefillLane
from glm53srv.offload.device.gpu.split_table import SplitTable
from glm53srv.offload.device.gpu.step_words import StepWords
from glm53srv.offload.device.heat_keeper import HeatKeeper
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.report import OffloadReport
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.warm_fill import fill_from_history

logger = logging.getLogger(__name__)


class GpuOffload:
    """Owns slots, residency, loan and plans. Every call comes from the engine thread, on its main stream.

    The engine brackets its work as engine/expert_steps.py says; the sparse layers call begin_layer,
    plan_layer, combine and end_layer from inside.
    """

    def __init__(
        self,
        memory: GpuMemory,
        max_rows: int,
        options: OffloadOptions,
        lane: CpuLane | None = None,
        prefill_lane: PrefillLane | None = None,
        *,
        fingerprint: str = "",
        poisons: bool = False,
    ) -> None:
        """Allocate the slots. lane: the CPU workers, None in exact mode; prefill_lane: those for short
        prompts, None without; the offload closes both.

        fingerprint: of the routers, see model/fingerprint.py. poisons: see GpuSlots. Call start() before the
        first step. Raises torch.OutOfMemoryError.
        """
        arena, plan = memory.arena, memory.plan
        geometry, device = arena.geometry, memory.alias.device
        self.arena = arena
        self.plan = plan
        residency = options.residency if plan.landing else replace(options.residency, num_offers=0)
        self.policy = ResidencyPolicy(geometry, plan.num_slots, residency)
        self.store = GpuSlots(arena, plan.num_slots, plan.chunk_slots, device, poisons=poisons)
        self.lane = lane
        self.prefill_lane = prefill_lane
        self._is_shared = False  # the CPU computes a part of the chunk that runs
        self.counts = Counts()
        self.last_picks: NDArray[np.int32] | None = None  # of the newest step read, until the next is
        self._options = options
        self._loan = ChunkLoan(
            self.policy,
            self.store,
            plan,
            memory.loan,
            options,
            self.counts,
            learn_last=self._learn_last,
            apply=self._apply,
        )
        self.tables = memory.tables
        self._device = device
        self._base = int(memory.alias.data_ptr())
        self._heat_keeper = HeatKeeper(options.heat, geometry, fingerprint)
        self._reader = HostReader()
        self._rows = 0
        layers = geometry.num_layers
        self._buffers = DecodeBuffers(geometry, arena.layout, self.tables, max_rows, plan.landing, device)
        self.landing = self._buffers.landing
        self._costs = SplitTable(options, arena.layout.num_parts, self._reader, self._buffers.cpu_count)
        self._may_split = memory.is_split and lane is not None
        self._is_split = self._may_split
        self.copy_shape = USUAL
        self._planned: Any = None  # an event of the decode layer that runs
        self._words = StepWords(geometry, device)
        self._vram_bytes = 0
        self._report: OffloadReport | None = None
        # Slices made once, as in the buffers.
        self._slot_rows = [self.store.device_table[layer] for layer in range(layers)]
        streams = make_side_streams(device)
        self.look_ahead = LookAhead(self._guessed_model(memory), plan.ahead, max_rows, device, streams)
        self._streams = streams
        buffers = self._buffers
        self._logs = HostLogs(buffers.log, buffers.lanes, buffers.counts, self.look_ahead.told)

    @property
    def report(self) -> OffloadReport | None:
        """The snapshot that the last step or chunk left, None before start(). Any thread may read it."""
        return self._report

    @property
    def is_decoding(self) -> bool:
        """Tell whether the layers called now belong to a decode step."""
        return self._rows > 0

    @property
    def calibration(self) -> Calibration:
        """The costs as measured at start."""
        return self._costs.ledger.calibration

    def start(self, calibration: Calibration) -> None:
        """Begin with these costs, and with the experts that an earlier run found popular."""
        self._open_costs(calibration, self._options.costs)
        # Without workers, in exact mode, attention is of cooperative kernels: see look_ahead.MAX_ROWS.
        num_ahead = 0 if self.lane is None else self.plan.ahead
        self.look_ahead.limit(num_ahead)
        history = self._heat_keeper.load()
        if history is not None:
            self.counts.num_copies += fill_from_history(self.policy, history, self._execute)
        self._vram_bytes = torch.cuda.memory_reserved(self._device)
        self._report = self._describe()
        keys, slots = self.policy.geometry.num_keys, self.plan.num_slots
        launches = 2 if self._is_split and self.landing.num_experts else 1
        logger.info("offload slots=%d experts=%d ahead=%d launches=%d", slots, keys, num_ahead, launches)

    def change_lane(self, make: Callable[[], CpuLane | None], costs: CostOverrides) -> None:
        """Replace the CPU workers, and begin with the start's costs again; no step may run.

        make: gives the new ones once the old have ended.
        """
        calibration, lane = self.calibration, self.lane
        self.lane = None
        if lane is not None:
            lane.close()
        self.lane = make()
        self._open_costs(calibration, costs)

    def share_experts(self, is_wanted: bool) -> None:
        """Share an expert of each layer between link and CPU from now on, or none; for measurements."""
        self._costs.share(is_wanted, self.landing.num_experts)

    def split_launches(self, is_wanted: bool) -> None:
        """Compute experts in VRAM before the others from now on, where layers may be split; for measurements.
        Before the next capture."""
        self._is_split = self._may_split and is_wanted

    # ---- brackets of the engine ----

    def begin_chunk(self, num_tokens: int) -> None:
        """Borrow slots for a prefill chunk, and for staging it if it is long enough: see stage_chunk."""
        is_staging = self._loan.begin(num_tokens)
        self._is_shared = (
            self.prefill_lane is not None
            and not is_staging
            and num_tokens <= self._options.cpu_prefill_tokens
        )

    def stage_chunk(self) -> None:
        """Begin to stage, once the chunk's embeddings are on their way: behind the copies of two layers'
        experts they arrived 70 ms later on an H200."""
        self._loan.stage()

    def end_chunk(self, is_more_waiting: bool) -> None:
        """End a chunk, finished or not, and give its loan back: see ChunkLoan.end."""
        self._is_shared = False
        if self.prefill_lane is not None:
            self.prefill_lane.drop()
        self._loan.end(is_more_waiting)
        self._vram_bytes = torch.cuda.memory_reserved(self._device)
        self._report = self._describe()

    def begin_decode(self, num_rows: int, *, is_captured: bool) -> int:
        """Begin a decode step: what the layers plan from here on belongs to it.

        Gives the number of its first CPU job as an int32, 0 without a lane. is_captured: the layers were
        planned inside planning(), whose first_job must get it; otherwise it is sent from here.
        """
        if not 1 <= num_rows <= self._buffers.max_rows:
            raise EngineError(f"a decode step of {num_rows} rows, the offload has {self._buffers.max_rows}")
        self._rows = num_rows
        self.look_ahead.begin_step(num_rows)
        if self.lane is None:
            return 0
        first_job = self.lane.begin_step()
        if not is_captured:
            self.lane.ring.first_seq.fill_(first_job)
        return first_job

    @contextlib.contextmanager
    def planning(self, num_rows: int, first_job: torch.Tensor) -> Iterator[None]:
        """Let the layers plan a step of num_rows rows that is captured into a graph and not run.

        first_job: int32 (1,) on the device, from which each replay takes what begin_decode gave.
        """
        lane = self.lane
        self._rows = num_rows
        self.look_ahead.begin_step(num_rows)
        try:
            with (
                contextlib.nullcontext() if lane is None else lane.numbered_at(first_job),
                self.look_ahead.captured(),
            ):
                yield
        finally:
            self._rows = 0

    def crossing(self, layer: int) -> Callable[[], None] | None:
        """See LookAhead.crossing."""
        return self.look_ahead.crossing(layer)

    def end_decode(self, step_ms: float) -> None:
        """End the enqueueing of a step: send its log on its way, and do the host's work beside it.

        step_ms: time of the step before, which the copy budget grants by.
        """
        ledger = self._costs.ledger
        if self.lane is not None:
            ledger.observe_cpu(self.lane.take_answers())
        log = self._logs.swap(self._rows * self.policy.geometry.top_k, is_guessed=self.look_ahead.is_on)
        self._rows = 0
        if log is not None:
            self._learn(log)
        fixed = self._options.copies_per_step
        granted = ledger.grant(step_ms)
        update = self.policy.advance(self.store.take_landed(), granted if fixed is None else fixed)
        if fixed is None:
            ledger.spend(update.num_admitted)
        self._apply(update)
        self.counts.num_copies += len(update.copy_keys)
        self.counts.num_steps += 1
        ledger.end_step()
        if self.lane is not None:
            self._costs.send()
        self._report = self._describe()

    def finish_decode(self) -> None:
        """Follow a step whose end was waited for. Raises EngineError if the CPU workers failed."""
        if self.lane is not None:
            self.lane.check()

    def close(self) -> None:
        """Save the heat and free everything; the device must be idle. Idempotent."""
        self._heat_keeper.close(self.policy.history)
        self.store.close()
        if self.lane is not None:
            self.lane.close()
        if self.prefill_lane is not None:
            self.prefill_lane.close()

    # ---- called by the sparse layers, inside the brackets ----

    def begin_layer(self, layer: int) -> None:
        """Point a prefill layer's tables, before its router."""
        if self._rows:
            return
        slots = self._slot_rows[layer]
        if self._loan.staged is not None:
            slots = self._reader.pin(self._loan.staged.begin_layer(layer))
        self.point(layer, slots)

    def plan_layer(self, layer: int, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        """Plan a layer behind its router: decode, or a short prompt's. picks and weights may be changed."""
        if not self._rows:
            if self._is_shared and self.prefill_lane is not None:
                table, costs = self.store.table[layer], self._costs.ledger.costs
                self.prefill_lane.take(layer, x, picks, weights, table, costs)
            return
        layout, lane = self.arena.layout, self.lane
        inputs = PlanInputs(
            picks=picks,
            weights=weights,
            x=x,
            slots=self._slot_rows[layer],
            heat=self._words.heat_rows[layer],
            cpu_count=self._buffers.cpu_count,
            own_scales=self.tables[layer].own_scales,
            slot_addresses=self.store.addresses,
            offers=self._words.offers,
            offer_head=self._words.head,
            home=self.home(layer),
            layer=layer,
            record_bytes=layout.record_bytes,
            up_offset=layout.offsets[1],
            down_offset=layout.offsets[2],
            num_parts=layout.num_parts,
            part_blocks=layout.num_blocks // layout.num_parts,
        )
        ring = None if lane is None else lane.ring
        ahead = self.look_ahead.ahead_of(layer)
        outputs = self._buffers.outputs(self._rows, layer)
        launch_plan(inputs, outputs, self.landing, ring, ahead, self._hit_weights())
        self._planned = self._streams.main().record_event()

    def land_layer(
        self,
        layer: int,
        x: torch.Tensor,
        run_hits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        run_shared: Callable[[], None] | None = None,
    ) -> None:
        """Copy the experts that the layer just planned wants over the link: decode.

        x: its router's input, float16 (rows, hidden). run_hits: enqueues routed experts with these weights,
        float16 (rows, top_k), and gives their sums, float32 (rows, hidden), which the next launch overwrites:
        in fast mode those in VRAM, beside the copies; combine() adds them. run_shared: enqueues the shared
        expert. None where the layer computes all of them at once behind the copies.
        """
        if not self._rows:
            return
        weights, sums = self._hit_weights(), self._buffers.hit_sums[: self._rows]

        def run_first() -> None:
            assert run_hits is not None
            assert weights is not None
            # By a kernel: a copy might queue behind staged experts.
            torch.mul(run_hits(weights), 1.0, out=sums)

        first = None if weights is None else run_first
        work = LayerWork(self._planned, x, self.gather, first, run_shared)
        enqueue_copies(self._streams, self.look_ahead, layer, work)

    def gather(self) -> None:
        """Enqueue the copies that landing lists, by the kernel that decode steps use."""
        cut = None if self.lane is None else self._buffers.cut
        launch_gather(self.landing, self.arena.layout.record_bytes, self.copy_shape, cut=cut)

    def combine(self, layer: int, out: torch.Tensor) -> None:
        """Complete a layer's sum, float32 (rows, hidden): by the CPU's part, behind a wait for it, and by
        that of experts which were computed before the others."""
        if not self._rows and self.prefill_lane is not None:
            self.prefill_lane.add(out)
        if self._rows and self.look_ahead.behind_experts:
            self.look_ahead.fetch_behind(layer, self._streams.main().record_event())
        if self._rows and self.lane is not None:
            sums = None if self._hit_weights() is None else self._buffers.hit_sums
            launch_combine(out, self._buffers.count_rows[layer], layer, self.lane.ring, sums)

    def end_layer(self, layer: int) -> None:
        """Issue the copies of the layer after next, behind a prefill layer's kernels; end a decode layer."""
        if self._rows:
            self.look_ahead.join(layer)
        elif self._loan.staged is not None:
            self._loan.staged.end_layer(layer)

    def point(self, layer: int, slots: torch.Tensor) -> None:
        """Fill a layer's tables whole. slots: int32 (experts,) on the device, -1 for home."""
        layout = self.arena.layout
        places = (layout.record_bytes, layout.offsets[1], layout.offsets[2])
        outputs, own_scales = self._buffers.outputs(0, layer), self.tables[layer].own_scales
        launch_point(slots, self.store.addresses, outputs, own_scales, self.home(layer), places)

    def home(self, layer: int) -> int:
        """Give the device's address of a layer's first record."""
        return self._base + layer * self.policy.geometry.num_experts * self.arena.layout.record_bytes

    # ---- inside ----

    def _open_costs(self, calibration: Calibration, costs: CostOverrides) -> None:
        has_workers, num_landing = self.lane is not None, self.landing.num_experts
        self._costs.open(calibration, costs, has_workers=has_workers, num_landing=num_landing)

    def _guessed_model(self, memory: GpuMemory) -> GuessedModel:
        """Tell the look-ahead what it may guess."""
        num_layers = memory.arena.geometry.num_layers
        homes = [self.home(layer) for layer in range(num_layers)]
        size = memory.arena.layout.record_bytes
        guessed = (memory.routers, memory.across)
        return GuessedModel(memory.arena.geometry, size, *guessed, self._slot_rows, homes)

    def _hit_weights(self) -> torch.Tensor | None:
        """Give the weights of experts in VRAM, for the rows of this step; None if all go in one launch."""
        if not self._is_split or not self.landing.num_experts:
            return None
        return self._buffers.hit_weights[: self._rows]

    def _learn(self, log: StepLog) -> None:
        self.last_picks = log.picks
        self.policy.observe(log.picks, log.kept)
        self._heat_keeper.end_step(self.policy.history)
        self.counts.add_log(log.picks, log.kept, log.lanes, log.counts, log.guesses)
        if self.lane is not None:
            times = read_stamps(log, self.arena.layout.num_blocks)
            self.counts.add_times(sum(ms for _, _, ms in times.gpu_lanes), times.wait_ms)
            self._costs.ledger.observe_gpu(times.gpu_lanes)

    def _apply(self, update: ResidencyUpdate) -> None:
        """Enqueue what the next step will read: table, heat, offers; and issue the copies."""
        self.store.apply(update)
        if self.lane is not None or update.offers is not None:
            self._words.send(self._reader, self.policy.heat_table(), update.offers)

    def _execute(self, update: ResidencyUpdate) -> NDArray[np.int32]:
        self._apply(update)
        self.store.drain()
        return self.store.take_landed()

    def _learn_last(self) -> None:
        """Read the newest step's log, if it was not read yet."""
        log = self._logs.take_last()
        if log is not None:
            self._learn(log)

    def _describe(self) -> OffloadReport:
        crew = None if self.lane is None else self.lane.stats()
        return describe_offload(
            "cuda",
            self._options,
            self.policy,
            self.counts,
            self._costs.ledger,
            self._heat_keeper,
            crew,
            self._vram_bytes,
        )
