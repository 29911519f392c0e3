"""The engine for machines without a GPU: numpy and native kernels, float32, no torch.

The slots' states are those of slot_book.py. A chunk's streams (rows, 4, hidden) wait in the slot while decode
steps of other slots run; nothing of the chunk depends on them, so a pause changes no bit. Decode rows are
computed so that a row's bits do not depend on the other rows (model/linear.py), so a sequence gives the same
tokens alone and in company.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

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
from glm53srv.engine.expert_steps import ExpertsInPlace, ExpertSteps
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.engine.sampler import SamplerBank
from glm53srv.engine.slot_book import Slot, SlotBook, require
from glm53srv.errors import EngineError
from glm53srv.kernels import Isa, KernelPool, Precision
from glm53srv.model.decoder import Decoder
from glm53srv.model.linear import BATCH_INVARIANT_ROWS, KernelContext
from glm53srv.model.loading import load_decoder
from glm53srv.model.ops import F32
from glm53srv.model.state import PAGE_TOKENS, PagedCache, SequenceState, view_of
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.request import TokenLogprobs

if TYPE_CHECKING:
    from glm53srv.offload.device.opener import OffloadOpener
    from glm53srv.offload.report import OffloadReport

Progress = Callable[[float, str], None]

_WARM_UP_TOKENS = 16

_JUDGED_ROWS = 32
"""Rows of prompt logits that exist at once: 20 MB of float32 at GLM's 154,880 ids; a chunk has 317 MB."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a CPU engine is built.

    cache_tokens: room of the paged cache over all sequences, rounded up to whole pages; its memory is taken
    as it is used. num_threads: of the native pool. cpus: logical CPUs to pin them to, or None. offload: run
    the routed experts through a simulated GPU's cache and the CPU workers; None computes them in place.
    """

    max_streams: int = 4
    cache_tokens: int = 131072
    max_chunk_tokens: int = 512
    num_threads: int = 1
    isa: Isa = Isa.AUTO
    precision: Precision = Precision.EXACT32
    cpus: tuple[int, ...] | None = None
    offload: OffloadOptions | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return -(-self.cache_tokens // PAGE_TOKENS)


class CpuEngine:
    """Engine over a decoder. Every call comes from the engine thread, which also owns the kernel pool.

    Use load(). The pool given to the constructor is closed by close(). While an engine lives, numpy's BLAS
    runs on one thread, in the whole process: its idle threads spin for the cores that the kernel pool needs
    (512 tokens of prefill took 2.9 s with two BLAS threads and 0.35 s with one, on 2 busy cores of an EPYC
    virtual machine, 2026-11), and its sums depend on their number.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KernelPool,
        sampler: SamplerBank,
        options: EngineOptions,
        experts: ExpertSteps | None = None,
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._experts = experts or ExpertsInPlace()
        self._pool = pool
        self._sampler = sampler
        self._limits = EngineLimits(
            max_streams=options.max_streams,
            max_context_tokens=min(config.max_context_tokens, options.num_pages * PAGE_TOKENS),
            max_chunk_tokens=options.max_chunk_tokens,
            page_tokens=PAGE_TOKENS,
            num_pages=options.num_pages,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        self._cache = PagedCache(config, options.num_pages)
        self._book: SlotBook[SequenceState, F32] = SlotBook(self._limits)
        self._free_states: list[SequenceState] = []
        self._is_usable = True
        self._blas_limit = threadpool_limits(limits=1, user_api="blas")

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: EngineOptions,
        progress: Progress | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> CpuEngine:
        """Load a checkpoint on the calling thread, the engine thread from then on.

        progress: called with a fraction from 0 to 1 and the stage. grammars: for constrained requests. Raises
        CheckpointError or MachineError.
        """
        pool = KernelPool(options.num_threads, options.isa, options.cpus)
        context = KernelContext(pool, options.precision)
        opener = _opener(context, options, progress)
        try:
            decoder = load_decoder(model_dir, context, progress, opener)
            config = decoder.config
            num_valid_ids = count_token_ids(model_dir, config.vocab_size)
        except BaseException:
            if opener is not None:
                opener.close()
            pool.close()
            raise
        sampler = SamplerBank(config.vocab_size, config.eos_token_ids, num_valid_ids, grammars)
        return cls(decoder, pool, sampler, options, None if opener is None else opener.offload)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def offload_report(self) -> OffloadReport | None:
        return self._experts.report

    @property
    def is_random(self) -> bool:
        """Tell whether the weights are noise; the server says so."""
        return self._decoder.config.is_random

    def warm_up(self) -> None:
        """Run a chunk and a decode step of each width, on states and cache pages that nobody uses yet."""
        require(not self._book.slots, "warm_up while sequences run")
        decoder, layers = self._decoder, range(self._limits.num_layers)
        state = SequenceState(decoder.config)
        num_tokens = min(_WARM_UP_TOKENS, self._limits.max_chunk_tokens, self._limits.max_context_tokens - 1)
        streams = decoder.embed([0] * num_tokens)
        for layer in layers:
            streams = decoder.prefill_block(layer, streams, view_of(state, [0], 0), self._cache)
        for width in range(1, min(self._limits.max_streams, BATCH_INVARIANT_ROWS) + 1):
            views = [view_of(SequenceState(decoder.config), [0], 0) for _ in range(width)]
            streams = decoder.embed([0] * width)
            for layer in layers:
                streams = decoder.decode_block(layer, streams, views, self._cache)
            decoder.logits(streams)

    def close(self) -> None:
        """Free the threads and the sequences. Idempotent."""
        self._is_usable = False
        self._book.slots.clear()
        self._free_states.clear()
        self._experts.close()
        self._pool.close()
        self._blas_limit.restore_original_limits()

    def step(self, plan: StepPlan) -> StepResult:
        """Execute one step. Raises EngineError, after which only close() may follow."""
        require(self._is_usable, "step after a failed step or after close")
        self._is_usable = False
        try:
            result = self._run(plan)
        except EngineError:
            raise
        except Exception as error:  # the contract: a step fails with EngineError, whatever went wrong inside
            raise EngineError(f"step {plan.step_id} failed: {type(error).__name__}: {error}") from error
        self._is_usable = True
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        for slot_id in plan.release:
            self._release(slot_id)
        self._book.check_plan(plan)
        begin_s = time.perf_counter()
        prefill_done, last_row = False, None
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        layers_s: list[float] = []
        if plan.prefill is not None:
            last_rows = self._prefill(plan.prefill, layers_s)
            prefill_done = last_rows is not None
            if last_rows is not None:
                prompt_logprobs = self._judge_prompt(plan.prefill, last_rows)
                last_row = last_rows[-1:] if plan.prefill.is_last_chunk else None
        middle_s = time.perf_counter()
        streams = self._decode(plan.decode)
        slot_ids = [row.slot for row in plan.decode]
        if plan.prefill is not None and last_row is not None:
            streams.append(last_row)
            slot_ids.append(plan.prefill.slot)
        tokens = self._sample(slot_ids, streams)
        end_s = time.perf_counter()
        stats = StepStats(
            prefill_s=middle_s - begin_s if plan.prefill is not None else 0.0,
            decode_s=end_s - middle_s if plan.decode else 0.0,
            layers_s=tuple(layers_s),
        )
        return StepResult(plan.step_id, tuple(tokens), prefill_done, stats, prompt_logprobs)

    def _release(self, slot_id: int) -> None:
        slot = self._book.slots.pop(slot_id, None)
        self._sampler.release(slot_id)
        if slot is not None:
            self._free_states.append(slot.state)
            if not slot.is_prefilled and not self._book.has_chunk:
                self._experts.end_chunk(is_more_waiting=False)

    def _prefill(self, piece: PrefillSlice, layers_s: list[float]) -> F32 | None:
        """Run the slice, adding each layer's seconds to layers_s.

        Gives the chunk's streams (tokens, 4, hidden) once they left the last layer.
        """
        if piece.start is not None:
            self._start(piece, piece.start)
        slot = self._book.check_slice(piece)
        streams = self._decoder.embed(piece.token_ids) if slot.in_flight is None else slot.in_flight
        sequence = view_of(slot.state, piece.page_ids, piece.start_position)
        if piece.layer_begin == 0:
            self._experts.begin_chunk(len(piece.token_ids))
        for layer in range(piece.layer_begin, piece.layer_end):
            begin_s = time.perf_counter()
            streams = self._decoder.prefill_block(layer, streams, sequence, self._cache)
            layers_s.append(time.perf_counter() - begin_s)
        if piece.layer_end < self._limits.num_layers:
            slot.pause(piece, streams)
            return None
        self._experts.end_chunk(is_more_waiting=not piece.is_last_chunk)
        slot.finish(piece)
        return streams

    def _judge_prompt(self, piece: PrefillSlice, streams: F32) -> tuple[TokenLogprobs, ...]:
        """Run the wanted rows of a chunk that is done through the head, a block at a time."""
        begin = piece.start_position
        wanted = self._sampler.prompt_positions(piece.slot, begin, begin + len(piece.token_ids))
        judged: list[TokenLogprobs] = []
        for first in range(0, len(wanted), _JUDGED_ROWS):
            positions = wanted[first : first + _JUDGED_ROWS]
            row = positions.start - 1 - begin  # the token before judges a position
            logits = self._decoder.logits(streams[row : row + len(positions)])
            judged += self._sampler.judge_prompt(piece.slot, positions, logits)
        return tuple(judged)

    def _start(self, piece: PrefillSlice, start: SequenceStart) -> None:
        self._book.check_start(piece)
        state = self._free_states.pop() if self._free_states else SequenceState(self._decoder.config)
        state.reset()
        self._sampler.start(piece.slot, start)
        self._book.slots[piece.slot] = Slot(state)

    def _decode(self, rows: Sequence[DecodeRow]) -> list[F32]:
        """Run all layers for one token of each row; gives the streams in pieces of a few rows."""
        slots = self._book.check_decode(rows)
        pieces = []
        for first in range(0, len(rows), BATCH_INVARIANT_ROWS):
            group = rows[first : first + BATCH_INVARIANT_ROWS]
            views = [
                view_of(slot.state, row.page_ids, row.position)
                for slot, row in zip(slots[first:], group, strict=False)
            ]
            streams = self._decoder.embed([row.token_id for row in group])
            self._experts.begin_decode(len(group))
            for layer in range(self._limits.num_layers):
                streams = self._decoder.decode_block(layer, streams, views, self._cache)
            self._experts.end_decode()
            pieces.append(streams)
        for slot in slots:
            slot.num_computed += 1
        return pieces

    def _sample(self, slot_ids: Sequence[int], pieces: Sequence[F32]) -> list[SampledToken]:
        if not slot_ids:
            return []
        streams = np.concatenate(pieces)
        groups = range(0, len(streams), BATCH_INVARIANT_ROWS)
        logits = [self._decoder.logits(streams[first : first + BATCH_INVARIANT_ROWS]) for first in groups]
        return self._sampler.sample(slot_ids, np.concatenate(logits))


def _opener(
    context: KernelContext, options: EngineOptions, progress: Progress | None
) -> OffloadOpener | None:
    if options.offload is None:
        return None
    from glm53srv.offload.device.opener import OffloadOpener

    return OffloadOpener(context, options.max_streams, options.offload, progress)
