"""The engine on a GPU; the contract is engine/base.py's, the slots' states are slot_book.py's.

    step    release -> prefill slice -> decode step enqueued -> host work of the offload -> logits -> tokens

The host waits for the device once per step, for the logits, and behind a prefill slice, so that its time is
its own. Between the logits and the next step's first kernel the device is idle: what does not depend on the
tokens is done before the wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm53srv.engine.base import (
    DecodeRow,
    EngineLimits,
    PrefillSlice,
    SampledToken,
    SequenceStart,
    StepPlan,
    StepResult,
    StepStats,
)
from glm53srv.engine.cuda.graphs import MOST_BY_ROW
from glm53srv.engine.cuda.loading import (
    CudaOptions,
    LoadedModel,
    OpenedOffload,
    hire,
    limit_vram,
    load_model,
    open_offload,
)
from glm53srv.engine.cuda.model import PAGE_TOKENS, Chunk
from glm53srv.engine.cuda.package import open_package
from glm53srv.engine.cuda.prefilled import Prefilled, with_tail
from glm53srv.engine.cuda.sequence_pages import SequencePages
from glm53srv.engine.cuda.warm_up import FIRST_STEP_MS, capture_every_width, run_every_shape
from glm53srv.engine.cuda.watchdog import DeviceWatchdog
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.engine.sampler import SamplerBank
from glm53srv.engine.slot_book import Slot, SlotBook, require
from glm53srv.errors import EngineError, MachineError
from glm53srv.machine import MachineFacts
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import load_model_config
from glm53srv.model.fingerprint import routing_fingerprint
from glm53srv.model.tensor_needs import all_needs
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.offload.device.layout import sparse_layers
from glm53srv.offload.report import OffloadReport
from glm53srv.progress import Progress
from glm53srv.request import TokenLogprobs

logger = logging.getLogger(__name__)

_JUDGED_ROWS = 32
"""Rows of prompt logits that exist at once, as in the CPU engine."""
NUM_CHECKED_SLOTS = 32
"""Resident experts compared with their home copies after warm-up."""


class CudaEngine:
    """Engine over a loaded model and its offload. Every call comes from the engine thread. Use load()."""

    def __init__(
        self, loaded: LoadedModel, sampler: SamplerBank, options: CudaOptions, opened: OpenedOffload
    ) -> None:
        config = loaded.config
        self._loaded = loaded
        self._options = options
        self._model = loaded.model
        self._sampler = sampler
        self._offload = opened.offload
        self._room = opened.room
        self._limits = EngineLimits(
            max_streams=options.max_streams,
            max_context_tokens=min(config.max_context_tokens, options.num_pages * PAGE_TOKENS),
            max_chunk_tokens=opened.chunk_tokens,
            page_tokens=PAGE_TOKENS,
            num_pages=options.num_pages,
            num_layers=loaded.model.num_layers,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        self._pages = SequencePages(self._limits, opened.room)
        self._book: SlotBook[Any, Chunk] = SlotBook(self._limits)
        self._is_usable = True
        self._is_closed = False
        self._watchdog = DeviceWatchdog()
        self._failed: dict[int, str] = {}  # slots whose prompt outgrew the card, and what is said of them
        self._step_ms = FIRST_STEP_MS
        self.most_by_row = MOST_BY_ROW if options.mode == "fast" else 0  # counts from the next capture on

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: CudaOptions,
        machine: MachineFacts,
        progress: Progress | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> CudaEngine:
        """Load a checkpoint on the calling thread, the engine thread from then on.

        Raises CheckpointError for the files, MachineError for the packages, the card or host memory.
        """
        report = progress or (lambda fraction, stage: None)
        report(0.0, "reading the configuration")
        config = load_model_config(model_dir)
        num_ids = count_token_ids(model_dir, config.vocab_size)
        checkpoint = Checkpoint(model_dir)
        checkpoint.check(all_needs(config))
        package = open_package(options.mode, options.tuning_dir)
        limit_vram(options)
        arena = ExpertArena.load(
            checkpoint,
            config,
            machine,
            ArenaOptions(pinning=RegisteredMemory(package.extension)),
            lambda part, stage: report(0.02 + 0.68 * part, stage),
        )
        try:
            loaded = load_model(
                package, model_dir, config, arena, options, lambda part: report(0.7 + 0.2 * part, "weights")
            )
            report(0.9, "measuring the card")
            sampler = SamplerBank(config.vocab_size, config.eos_token_ids, num_ids, grammars)
            fingerprint = routing_fingerprint(checkpoint, config, sparse_layers(config))
            return cls.open(loaded, sampler, options, fingerprint)
        except BaseException:
            arena.close()
            raise

    @classmethod
    def open(
        cls, loaded: LoadedModel, sampler: SamplerBank, options: CudaOptions, fingerprint: str = ""
    ) -> CudaEngine:
        """Build the cache around a loaded model, and the engine around both. Raises MachineError."""
        try:
            opened = open_offload(loaded, options, fingerprint)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                f"the card is full before the expert cache has a slot: lower -cs or --max-batch-size "
                f"({str(error).splitlines()[0]})"
            ) from error
        return cls(loaded, sampler, options, opened)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def is_random(self) -> bool:
        """Tell whether the weights are noise; the server says so."""
        return self._loaded.config.is_random

    @property
    def offload_report(self) -> OffloadReport | None:
        return self._offload.report

    @property
    def offload(self) -> GpuOffload:
        """The offload, for statistics and checks by the engine thread."""
        return self._offload

    @property
    def pages(self) -> SequencePages:
        """The pages of running sequences, for checks by the engine thread."""
        return self._pages

    @property
    def captured_widths(self) -> tuple[int, ...]:
        """Numbers of streams whose decode steps run as CUDA graphs."""
        return tuple(self._model.captured_widths)

    def warm_up(self) -> None:
        """Run a whole chunk, staged, and decode steps of each width, capture these, then check some slots."""
        require(not self._book.slots, "warm_up while sequences run")
        with torch.inference_mode():
            run_every_shape(self._model, self._offload, self._limits, self._pages.fill)
            self.capture()
            self._pages.shrink()
        self.check_slots(NUM_CHECKED_SLOTS)

    def capture(self) -> None:
        """Capture decode steps of each width, behind warm_up's shapes; again if what they launch is other."""
        require(not self._book.slots, "capture while sequences run")
        if self._options.graphs:
            with torch.inference_mode():
                capture_every_width(self._model, self._offload, self._limits, most_by_row=self.most_by_row)

    def change_workers(self, crew_isa: str, crew_threads: int | None, costs: CostOverrides) -> None:
        """Start other CPU workers and begin with the start's costs again; capture() must follow.

        For measurements. No sequence may run. crew_threads: None for as many as at the start. Raises
        MachineError.
        """
        require(not self._book.slots, "change_workers while sequences run")
        self._model.wait()
        self._model.drop_graphs()
        usual = self._options.offload
        offload = replace(usual, crew_isa=crew_isa, crew_threads=crew_threads or usual.crew_threads)
        self._offload.change_lane(lambda: hire(self._loaded, replace(self._options, offload=offload)), costs)

    def check_slots(self, num_samples: int, seed: int = 0) -> int:
        """Compare resident experts with their home copies; gives how many. Raises EngineError naming one."""
        flat = self._offload.store.table.reshape(-1)
        resident = np.flatnonzero(flat >= 0)
        keys = np.random.default_rng(seed).permutation(resident)[:num_samples].tolist()
        wrong = self._offload.store.verify(keys)
        if wrong:
            layer, expert = divmod(wrong[0], self._offload.policy.geometry.num_experts)
            raise EngineError(
                f"expert {expert} of sparse layer {layer} differs in VRAM from its home copy: bad memory"
            )
        return len(keys)

    def close(self) -> None:
        """Free the device and the arena. Idempotent."""
        if self._is_closed:
            return
        self._is_closed, self._is_usable = True, False
        self._watchdog.close()
        self._book.slots.clear()
        try:
            self._model.wait()
            self._offload.close()
            for layer in self._loaded.layers:
                layer.offload = None
            self._model.unload()
            if self._room is not None:
                self._room.close()
        except RuntimeError as error:  # a device that failed stays failed; the process ends next
            logger.error("the GPU could not be freed: %s", str(error).splitlines()[0])
            self._loaded.arena.abandon()
            return
        self._loaded.arena.close()

    def step(self, plan: StepPlan) -> StepResult:
        """Execute one step. Raises EngineError, after which only close() may follow."""
        require(self._is_usable, "step after a failed step or after close")
        self._is_usable = False
        try:
            self._watchdog.begin(f"step {plan.step_id}")
            with torch.inference_mode():
                result = self._run(plan)
        except EngineError:
            raise
        except Exception as error:  # the contract: a step fails with EngineError, whatever went wrong inside
            raise EngineError(f"step {plan.step_id} failed: {type(error).__name__}: {error}") from error
        finally:
            self._watchdog.end()
        self._is_usable = True
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        for slot_id in plan.release:
            self._release(slot_id)
        self._book.check_plan(plan)
        if plan.prefill is None:
            self._pages.shrink()
            if not plan.decode:
                self._offload.tell()
        begin_s = time.perf_counter()
        done = Prefilled()
        if plan.prefill is not None:
            done = self._prefill(plan.prefill)
            self._model.wait()
        middle_s = time.perf_counter()
        layers_s = with_tail(done.layers_s, middle_s - begin_s)
        tokens: list[SampledToken] = []
        if plan.decode:
            tokens = self._decode(plan.decode)
        if plan.prefill is not None and done.last_row is not None:
            tokens += self._sampler.sample([plan.prefill.slot], done.last_row)
        if plan.prefill is not None and done.error is not None:
            tokens.append(SampledToken(plan.prefill.slot, 0, error=done.error))
        end_s = time.perf_counter()
        if plan.decode:
            self._step_ms = (end_s - middle_s) * 1e3
        stats = StepStats(
            prefill_s=middle_s - begin_s if plan.prefill is not None else 0.0,
            decode_s=end_s - middle_s if plan.decode else 0.0,
            layers_s=layers_s,
        )
        return StepResult(plan.step_id, tuple(tokens), done.is_done, stats, done.prompt_logprobs)

    def _release(self, slot_id: int) -> None:
        slot = self._book.slots.pop(slot_id, None)
        self._failed.pop(slot_id, None)
        self._sampler.release(slot_id)
        self._pages.release(slot_id)
        if slot is not None:
            slot.state.free()
            if not slot.is_prefilled and not self._book.has_chunk:
                self._offload.end_chunk(is_more_waiting=False)

    def _prefill(self, piece: PrefillSlice) -> Prefilled:
        """Run the slice; a prompt that outgrows the card's memory ends alone, with an error."""
        if piece.start is not None:
            self._start(piece, piece.start)
        slot = self._book.check_slice(piece)
        if piece.slot not in self._failed:
            try:
                return self._run_slice(piece, slot)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            # Not inside the handler: until it ends, the error's frames hold the chunk's activations.
            self._drop(piece, slot, reason)
        # The plans of a dropped prompt go on until its last chunk, the place for news about it.
        if piece.layer_end < self._limits.num_layers:
            slot.chunk, slot.next_layer = piece.token_ids, piece.layer_end
            return Prefilled()
        slot.finish(piece)
        return Prefilled(True, error=self._failed[piece.slot] if piece.is_last_chunk else None)

    def _drop(self, piece: PrefillSlice, slot: Slot[Any, Chunk], reason: str) -> None:
        """Give up a prompt and what its chunk holds."""
        logger.warning("prompt of slot %d dropped: %s", piece.slot, reason)
        slot.in_flight = None
        self._failed[piece.slot] = (
            f"a prompt chunk of {len(piece.token_ids)} tokens at {piece.start_position} did not fit into GPU "
            "memory; use a shorter prompt, or a server with a smaller -chunk_size or -cs"
        )
        self._offload.end_chunk(is_more_waiting=False)

    def _run_slice(self, piece: PrefillSlice, slot: Slot[Any, Chunk]) -> Prefilled:
        begin, end = piece.start_position, piece.start_position + len(piece.token_ids)
        judged = self._sampler.prompt_positions(piece.slot, begin, end)
        if piece.layer_begin == 0:
            pages = self._pages.of_chunk(piece.slot, piece.page_ids, end)
            self._offload.begin_chunk(len(piece.token_ids))
            slot.in_flight = self._model.begin_chunk(
                piece.token_ids, slot.state, pages, begin, is_last=piece.is_last_chunk
            )
            self._offload.stage_chunk()
        chunk = slot.in_flight
        assert chunk is not None
        layers_s = tuple(
            self._model.run_layers(chunk, piece.layer_begin, piece.layer_end, wants_rows=len(judged) > 0)
        )
        if piece.layer_end < self._limits.num_layers:
            slot.pause(piece, chunk)
            return Prefilled(layers_s=layers_s)
        told: tuple[TokenLogprobs, ...] = ()
        last_row = None
        if piece.is_last_chunk or len(judged):
            hidden = self._model.last_hidden(chunk)
            told = self._judge(piece, chunk, hidden, judged)
            if piece.is_last_chunk:
                last_row = self._model.head(chunk, hidden[:, -1:])
            del hidden
        slot.finish(piece)
        del chunk  # its activations are the memory that is given back
        self._offload.end_chunk(is_more_waiting=not piece.is_last_chunk)
        return Prefilled(True, told, last_row, layers_s=layers_s)

    def _judge(
        self, piece: PrefillSlice, chunk: Chunk, hidden: torch.Tensor, wanted: range
    ) -> tuple[TokenLogprobs, ...]:
        """Run the wanted rows of a chunk that is done through the head, a block at a time."""
        told: list[TokenLogprobs] = []
        for first in range(0, len(wanted), _JUDGED_ROWS):
            positions = wanted[first : first + _JUDGED_ROWS]
            row = positions.start - 1 - piece.start_position  # the token before judges a position
            logits = self._model.head(chunk, hidden[:, row : row + len(positions)])
            told += self._sampler.judge_prompt(piece.slot, positions, logits)
        return tuple(told)

    def _start(self, piece: PrefillSlice, start: SequenceStart) -> None:
        self._book.check_start(piece)
        self._sampler.start(piece.slot, start)
        self._book.slots[piece.slot] = Slot(self._model.new_state())

    def _decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken]:
        """Decode a token of each row; a row for whose next page the card has no memory ends alone."""
        slots = self._book.check_decode(rows)
        try:
            pages = self._pages.of_rows(rows)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        else:
            return self._decode_with(rows, slots, pages)
        fitting = [row for row in rows if self._pages.has_memory(row.slot)]
        require(len(fitting) < len(rows), "pages without memory that no row reaches")
        for row in rows:
            if row not in fitting:
                logger.warning("sequence of slot %d dropped: %s", row.slot, reason)
                self._pages.release(row.slot)
        found = {token.slot: token for token in (self._decode(fitting) if fitting else ())}
        failed = "the GPU has no memory left for another page of this sequence; use a smaller -cs"
        return [found.get(row.slot) or SampledToken(row.slot, 0, error=failed) for row in rows]

    def _decode_with(
        self, rows: Sequence[DecodeRow], slots: Sequence[Slot[Any, Chunk]], pages: list[tuple[int, ...]]
    ) -> list[SampledToken]:
        is_captured = self._model.is_captured(len(rows))
        first_job = self._offload.begin_decode(len(rows), is_captured=is_captured)
        logits = self._model.decode(
            [row.token_id for row in rows],
            [slot.state for slot in slots],
            pages,
            [row.position for row in rows],
            first_job,
        )
        self._offload.end_decode(self._step_ms)
        host = self._model.to_host(logits)
        self._offload.finish_decode()
        for slot in slots:
            slot.num_computed += 1
        return self._sampler.sample([row.slot for row in rows], host)
