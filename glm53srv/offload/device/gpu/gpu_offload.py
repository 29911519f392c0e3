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

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.errors import EngineError, Glm53Error
from glm53srv.offload.calibrate import Calibration
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.cost_ledger import CostLedger
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.device.courier import Courier, find_driver_calls
from glm53srv.offload.device.describe import describe_offload
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.decode_layers import DecodeLayers
from glm53srv.offload.device.gpu.gpu_memory import GpuMemory
from glm53srv.offload.device.gpu.gpu_slots import GpuSlots
from glm53srv.offload.device.gpu.host_log import HostLogs, StepLog, read_stamps
from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.device.gpu.landing_order import OwnLaunches
from glm53srv.offload.device.gpu.prefill_lane import PrefillLane
from glm53srv.offload.device.gpu.slot_loans import SlotLoans
from glm53srv.offload.device.gpu.split_table import SplitTable
from glm53srv.offload.device.heat_keeper import HeatKeeper
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.look_ahead import MAX_AHEAD, AheadTuner
from glm53srv.offload.report import OffloadReport
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.warm_fill import fill_from_history

logger = logging.getLogger(__name__)


FEW_COPIES = 4
"""Copies into slots that a step may issue when the next one fetches ahead. Both go by one queue, and while
free slots are filled, at start or behind a prefill's loan, 20 of them and more take it for longer than a
layer waits (0.18 ms each on an H200)."""


NO_ANSWERS: NDArray[np.float64] = np.zeros((0, 2))


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
        courier: Courier | None = None,
        *,
        fingerprint: str = "",
        poisons: bool = False,
    ) -> None:
        """Allocate the slots. lane: the CPU workers, None in exact mode; courier: has the copy engine fetch
        ahead, None for nothing ahead. The offload closes them.

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
        most_rows = options.cpu_prefill_tokens if lane is not None else 0
        self.prefill_lane = PrefillLane(most_rows, arena.layout.hidden, geometry.top_k, device)
        self.cpu_prefill_tokens = options.cpu_prefill_tokens  # another number for measurements
        self._is_shared = False  # the CPU computes a part of the chunk that runs
        self.counts = Counts()
        self.last_picks: NDArray[np.int32] | None = None  # of the newest step read, until the next is
        self._options = options
        self.loans = SlotLoans(
            self.policy,
            self.store,
            plan,
            memory.loan,
            options,
            self.counts,
            learn_last=self._learn_last,
            apply=self._apply,
        )
        self._device = device
        self._heat_keeper = HeatKeeper(options.heat, geometry, fingerprint)
        self._reader = HostReader()
        self.layers = DecodeLayers(memory, self.store, max_rows, lane, courier)
        self.look_ahead = self.layers.look_ahead
        buffers = self.layers.buffers
        self.counts_overlap = True  # in the split's costs; False for measurements
        self.tunes_ahead = True  # by what gaps take; False for measurements
        self._across = np.array(memory.across or [False] * geometry.num_layers, bool)
        # The newest step, and that whose log is read next: others wait for the host between layers.
        self._is_captured = self._was_captured = False
        self._costs = SplitTable(options, arena.layout.num_parts, self._reader, buffers.cpu_count, max_rows)
        self._vram_bytes = 0
        self._report: OffloadReport | None = None
        self.courier = courier
        self._errands = None if courier is None else torch.cuda.Stream(device)
        self._num_late = 0  # steps that waited in vain
        self._num_issued = 0  # copies into slots, in the step before
        self._logs = HostLogs(buffers.log, buffers.lanes, buffers.counts, self.look_ahead.told)

    @property
    def report(self) -> OffloadReport | None:
        """The snapshot that the last step or chunk left, None before start(). Any thread may read it."""
        return self._report

    @property
    def lane(self) -> CpuLane | None:
        """The CPU workers, None in exact mode."""
        return self.layers.lane

    @property
    def is_decoding(self) -> bool:
        """Tell whether the layers called now belong to a decode step."""
        return self.layers.rows > 0

    @property
    def calibration(self) -> Calibration:
        """The costs as measured at start."""
        return self._costs.ledger.calibration

    def start(self, calibration: Calibration) -> None:
        """Begin with these costs, and with the experts that an earlier run found popular."""
        self._open_costs(calibration, self._options.costs)
        self._start_courier()
        history = self._heat_keeper.load()
        if history is not None:
            self.counts.num_copies += fill_from_history(self.policy, history, self._execute)
        self.tell()
        keys, slots = self.policy.geometry.num_keys, self.plan.num_slots
        launches = 2 if self.layers.has_hits else 1
        num_ahead = self.look_ahead.num_ahead
        logger.info("offload slots=%d experts=%d ahead=%d launches=%d", slots, keys, num_ahead, launches)

    def change_lane(self, make: Callable[[], CpuLane | None], costs: CostOverrides) -> None:
        """Replace the CPU workers, and begin with the start's costs again; no step may run.

        make: gives the new ones once the old have ended.
        """
        calibration, lane = self.calibration, self.lane
        self.layers.lane = None
        if lane is not None:
            lane.close()
        self.layers.lane = make()
        self._open_costs(calibration, costs)

    def share_experts(self, is_wanted: bool) -> None:
        """Share an expert of each layer between link and CPU from now on, or none; for measurements."""
        self._costs.share(is_wanted, self.layers.landing.num_experts)

    # ---- brackets of the engine ----

    def begin_chunk(self, num_tokens: int) -> None:
        """Borrow slots for a prefill chunk, and for staging it if it is long enough: see stage_chunk."""
        is_staging = self.loans.begin(num_tokens)
        self._is_shared = self.lane is not None and not is_staging and num_tokens <= self.cpu_prefill_tokens

    def stage_chunk(self) -> None:
        """Begin to stage, once the chunk's embeddings are on their way: behind the copies of two layers'
        experts they arrived 70 ms later on an H200."""
        self.loans.stage()

    def end_chunk(self, is_more_waiting: bool) -> None:
        """End a chunk, finished or not, and give its loan back: see SlotLoans.end."""
        self._is_shared = False
        self.prefill_lane.drop()
        work = self.prefill_lane.work
        self.counts.set_prompts(work.num_experts, work.job_s, work.device_s, work.waited_s)
        self.loans.end(is_more_waiting)
        self.tell()

    def tell(self) -> None:
        """Renew the report, where slots were lent or taken back and no decode step follows."""
        self._vram_bytes = torch.cuda.memory_reserved(self._device)
        self._report = self._describe()

    def begin_decode(self, num_rows: int, *, is_captured: bool) -> int:
        """Begin a decode step: what the layers plan from here on belongs to it.

        Gives the number of its first CPU job as an int32, 0 without a lane. is_captured: the layers were
        planned inside planning(), whose first_job must get it; otherwise it is sent from here.
        """
        max_rows = self.layers.buffers.max_rows
        if not 1 <= num_rows <= max_rows:
            raise EngineError(f"a decode step of {num_rows} rows, the offload has {max_rows}")
        self.layers.rows = num_rows
        self._is_captured = is_captured
        self.look_ahead.begin_step(num_rows)
        if self.courier is not None:
            # Not while kernels may still be loaded, nor in the queue behind staged experts or many copies.
            is_free = self.loans.staged is None and self._num_issued <= FEW_COPIES
            most = self._ahead.most(num_rows) if self.tunes_ahead else (MAX_AHEAD, MAX_AHEAD)
            self.look_ahead.allow(*(most if is_captured and is_free else (0, 0)))
            self.courier.ring()
        if self.lane is None:
            return 0
        self._costs.begin_step(num_rows)
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
        self.layers.rows = num_rows
        self.look_ahead.begin_step(num_rows)
        try:
            with (
                contextlib.nullcontext() if lane is None else lane.numbered_at(first_job),
                self.look_ahead.captured(),
            ):
                yield
        finally:
            self.layers.rows = 0

    def end_decode(self, step_ms: float) -> None:
        """End the enqueueing of a step: send its log on its way, and do the host's work beside it.

        step_ms: time of the step before, which the copy budget grants by.
        """
        ledger = self._costs.ledger_before  # log and answers are of that step
        answers = NO_ANSWERS if self.lane is None else self.lane.take_answers()
        width = self.layers.rows * self.policy.geometry.top_k
        log = self._logs.swap(width, is_guessed=self.look_ahead.num_ahead > 0)
        self.layers.rows = 0
        if log is not None:
            self._learn(log, ledger, answers)
        self._was_captured = self._is_captured
        if self.lane is not None:
            ledger.observe_cpu(self.lane.whole_jobs(answers))
        fixed = self._options.copies_per_step
        granted = ledger.grant(step_ms)
        update = self.policy.advance(self.store.take_landed(), granted if fixed is None else fixed)
        if fixed is None:
            ledger.spend(update.num_admitted)
        self._apply(update)
        self._num_issued = len(update.copy_keys)
        self.counts.num_copies += self._num_issued
        self.counts.num_steps += 1
        ledger.end_step()
        if self.lane is not None:
            self._costs.send()
        self._report = self._describe()

    def finish_decode(self) -> None:
        """Follow a step whose end was waited for. Raises EngineError if the CPU workers failed."""
        if self.lane is not None:
            self.lane.check()
        if self.courier is not None and self._errands is not None:
            self.courier.check()
            if self.courier.take_late():
                # Also orders that it has not looked at: their copies would spoil what is fetched next.
                self.courier.catch_up(self.look_ahead.newest_order())
                self._errands.synchronize()
                self.look_ahead.open_gate()
                self._say_late()

    def close(self) -> None:
        """Save the heat and free everything; the device must be idle. Idempotent."""
        self._heat_keeper.close(self.policy.history)
        self.store.close()
        if self.lane is not None:
            self.lane.close()
        if self.courier is not None:
            self.courier.close()

    # ---- called by the sparse layers, inside the brackets ----

    def begin_layer(self, layer: int) -> None:
        """Point a prefill layer's tables, before its router."""
        if self.is_decoding:
            return
        slots = self.layers.slot_rows[layer]
        if self.loans.staged is not None:
            slots = self._reader.pin(self.loans.staged.begin_layer(layer))
        self.layers.point(layer, slots)

    def begin_router(self) -> None:
        """Note that a layer's router has its input, from which the next layer is guessed."""
        if self.is_decoding:
            self.layers.begin_router()

    def plan_layer(self, layer: int, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        """Plan a layer behind its router: decode, or a short prompt's. picks and weights may be changed."""
        if self.is_decoding:
            self.layers.plan(layer, x, picks, weights)
        elif self._is_shared and self.lane is not None:
            table, costs = self.store.table[layer], self._costs.of(1).costs
            self.prefill_lane.take(self.lane.crew, layer, x, picks, weights, table, costs)

    def land_layer(self, layer: int, x: torch.Tensor, own: OwnLaunches | None = None) -> None:
        """Copy the experts that the layer just planned wants over the link: decode.

        x: its router's input, float16 (rows, hidden). own: launches beside the copies, in fast mode that of
        experts in VRAM, whose sums combine() adds; None where the layer computes all of its experts at once
        behind the copies.
        """
        if self.is_decoding:
            self.layers.land(layer, x, own)

    def combine(self, layer: int, out: torch.Tensor) -> None:
        """Complete a layer's sum, float32 (rows, hidden): by what others than its kernels have computed."""
        if self.is_decoding:
            self.layers.combine(layer, out)
        else:
            self.prefill_lane.add(out)

    def end_layer(self, layer: int) -> None:
        """Issue the copies of the layer after next, behind a prefill layer's kernels; end a decode layer."""
        if self.is_decoding:
            self.look_ahead.join(layer)
        elif self.loans.staged is not None:
            self.loans.staged.end_layer(layer)

    # ---- inside ----

    def _start_courier(self) -> None:
        """Start it, and try it out: a driver may refuse what it asks for."""
        courier, errands, arrived = self.courier, self._errands, self.look_ahead.arrived
        if courier is None or errands is None or arrived is None:
            return
        try:
            size, stream = self.arena.layout.record_bytes, errands.cuda_stream
            courier.start(find_driver_calls(), size, stream, arrived.data_ptr())
            self.look_ahead.try_out(courier, errands.synchronize, self.arena.records[0])
        except Glm53Error as error:
            logger.warning("no experts are fetched ahead of their layer: %s", error)
            self.courier = None
            courier.close()
            self.look_ahead.give_up()

    def _say_late(self) -> None:
        """Tell of it, and ever more rarely if it goes on."""
        self._num_late += 1
        if self._num_late & (self._num_late - 1) == 0:
            text = "experts fetched ahead were late, the step copied them itself; in %d steps so far"
            logger.warning(text, self._num_late)

    def _open_costs(self, calibration: Calibration, costs: CostOverrides) -> None:
        self._costs.open(
            calibration,
            costs,
            has_workers=self.lane is not None,
            num_landing=self.layers.landing.num_experts,
            is_overlapped=self.layers.has_hits and self.counts_overlap,
        )
        self._ahead = AheadTuner(calibration.copy_ms)

    def _learn(self, log: StepLog, ledger: CostLedger, answers: NDArray[np.float64] = NO_ANSWERS) -> None:
        self.last_picks = log.picks
        self.policy.observe(log.picks, log.kept)
        self._heat_keeper.end_step(self.policy.history)
        self.counts.add_log(log.picks, log.kept, log.lanes, log.counts, log.guesses)
        if self.lane is not None:
            times = read_stamps(log, self.arena.layout.num_blocks)
            self.counts.add_times(sum(ms for _, _, ms in times.gpu_lanes), times.wait_ms)
            ledger.observe_gpu(times.gpu_lanes)
            self.lane.learn(answers, times.cpu_ms)
            if self._was_captured:
                num_rows = log.picks.shape[1] // self.policy.geometry.top_k
                self._ahead.observe(num_rows, times.gap_ms, self._across)

    def _apply(self, update: ResidencyUpdate) -> None:
        """Enqueue what the next step will read: table, heat, offers; and issue the copies."""
        self.store.apply(update)
        if self.lane is not None or update.offers is not None:
            self.layers.words.send(self._reader, self.policy.heat_table(), update.offers)

    def _execute(self, update: ResidencyUpdate) -> NDArray[np.int32]:
        self._apply(update)
        self.store.drain()
        return self.store.take_landed()

    def _learn_last(self) -> None:
        """Read the newest step's log, if it was not read yet."""
        log = self._logs.take_last()
        if log is not None:
            self._learn(log, self._costs.ledger)

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
