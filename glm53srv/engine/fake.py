"""An engine without a model: it checks the contract strictly and makes tokens from the tokens before them.

FakeEngine stands in for a real engine in the tests of the scheduler, the step loop and the API. It keeps a
simulated paged memory, one cell per layer and position that holds the token id written there. Before it
samples, it reads a sequence back from its pages: a page in the wrong place, given away too early or written
by somebody else is found at the first step that could have used it. Logits are a function of the tokens read
back, or peak at a scripted token; they go through the real sampler, so that seeds, penalties, bans and log
probabilities behave as they do over a model.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.engine.sampler import SamplerBank
from glm53srv.errors import EngineError
from glm53srv.offload.report import OffloadReport
from glm53srv.request import TokenLogprobs

SCRIPTED_LOGIT = 30.0
"""Height of a scripted token over all others, whose logits are 0: certain, unless the request bends it."""


class ContractViolation(AssertionError):
    """A plan broke the engine contract; a bug of the caller, so it is not an EngineError."""


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """Seconds that a step reports (it does not take them).

    slow_layers cost, instead of layer_token_s, slow_token_s at position 0 and slow_growth_s more with every
    position of the chunk's start. tells_layers: report them one by one, not their sum alone.
    """

    layer_token_s: float = 0.0
    decode_row_s: float = 0.0
    slow_layers: tuple[int, ...] = ()
    slow_token_s: float = 0.0
    slow_growth_s: float = 0.0
    tells_layers: bool = False

    def layer_s(self, layer: int, piece: PrefillSlice) -> float:
        """Give the seconds of one layer of a slice's chunk."""
        token_s = self.layer_token_s
        if layer in self.slow_layers:
            token_s = self.slow_token_s + self.slow_growth_s * piece.start_position
        return token_s * len(piece.token_ids)


class StepGate:
    """Holds steps in flight, so that a test can act while one runs.

    Give `gate.pass_through` to FakeEngine as before_step. hold() and open() are called by the test;
    wait_until_held() blocks until a step stands at the gate (where the event loop must go on, call it in
    another thread).
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._from_step: int | None = None  # None: open
        self._held_step: int | None = None
        self._changed = threading.Condition()

    def hold(self, from_step: int = 0) -> None:
        """Stop steps from this id on; a held step below it goes."""
        with self._changed:
            self._from_step = from_step
            self._changed.notify_all()

    def open(self) -> None:
        """Let the held step go, and all others."""
        with self._changed:
            self._from_step = None
            self._changed.notify_all()

    def wait_until_held(self) -> int:
        """Block until a step stands at the gate; returns its id. Raises TimeoutError."""
        with self._changed:
            self._changed.wait_for(self._is_holding, self._timeout_s)
            if self._held_step is None or not self._is_holding():
                raise TimeoutError("no step came to the gate")
            return self._held_step

    def pass_through(self, plan: StepPlan) -> None:
        """Stand at the gate while it is held. Called on the engine thread, before each step."""
        with self._changed:
            self._held_step = plan.step_id
            self._changed.notify_all()
            is_let_through = self._changed.wait_for(lambda: not self._is_holding(), self._timeout_s)
            self._held_step = None
            if not is_let_through:
                raise TimeoutError(f"step {plan.step_id} was never let through")

    def _is_holding(self) -> bool:
        if self._from_step is None or self._held_step is None:
            return False
        return self._held_step >= self._from_step


class FakeEngine:
    """Engine over a checked, simulated paged memory. Same threading rules as any engine.

    scripts: output token ids by request id; after its last one the first end id follows (for ever).
    Sequences without a script get deterministic pseudo-random logits of their tokens.
    before_step: called on the engine thread with each plan; may block (StepGate) or raise. fail_at_step: the
    first step with this id or a later one raises EngineError. grammars: for constrained requests.
    offload_report: what it tells of an expert cache.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        scripts: Mapping[str, Sequence[int]] | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
        fail_at_step: int | None = None,
        costs: FakeCosts | None = None,
        grammars: GrammarCompiler | None = None,
        offload_report: OffloadReport | None = None,
    ) -> None:
        self._limits = limits
        self._offload_report = offload_report
        self._scripts = {} if scripts is None else scripts
        self._before_step = before_step
        self._fail_at_step = fail_at_step
        self._costs = FakeCosts() if costs is None else costs
        self._sampler = SamplerBank(limits.vocab_size, limits.eos_token_ids, grammars=grammars)
        self._memory = PagedMemory(limits)
        self._slots: dict[int, _Slot] = {}
        self._last_step_id = -1
        self._is_usable = True
        self._is_warm = False
        self._is_closed = False

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def offload_report(self) -> OffloadReport | None:
        return self._offload_report

    @property
    def used_slots(self) -> tuple[int, ...]:
        """The slots that hold a sequence, for tests that look for leaks."""
        return tuple(sorted(self._slots))

    @property
    def is_warm(self) -> bool:
        return self._is_warm

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def warm_up(self) -> None:
        _require(not self._is_closed, "warm_up after close")
        self._is_warm = True

    def close(self) -> None:
        self._is_closed = True
        self._is_usable = False
        self._slots.clear()

    def step(self, plan: StepPlan) -> StepResult:
        """Check and execute one step. Raises ContractViolation; EngineError or more where told to."""
        _require(self._is_usable, "step after a failed step or after close")
        self._is_usable = False
        if self._before_step is not None:
            self._before_step(plan)
        if self._fail_at_step is not None and plan.step_id >= self._fail_at_step:
            raise EngineError(f"step {plan.step_id} was told to fail")
        _require(plan.step_id > self._last_step_id, f"step id {plan.step_id} after {self._last_step_id}")
        self._last_step_id = plan.step_id
        for slot in plan.release:
            self._slots.pop(slot, None)
            self._sampler.release(slot)
        slots_used = [row.slot for row in plan.decode] + ([plan.prefill.slot] if plan.prefill else [])
        _require(len(set(slots_used)) == len(slots_used), f"a slot twice in one step: {slots_used}")
        sampled_slots = [row.slot for row in plan.decode]
        prefill_done = False
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if plan.prefill is not None:
            prefill_done = self._run_prefill(plan.prefill)
            if prefill_done:
                prompt_logprobs = self._judge_prompt(plan.prefill)
            if prefill_done and plan.prefill.is_last_chunk:
                sampled_slots.append(plan.prefill.slot)
        for row in plan.decode:
            self._run_decode(row)
        tokens = self._sample(sampled_slots)
        self._is_usable = True
        return StepResult(plan.step_id, tokens, prefill_done, self._stats(plan), prompt_logprobs)

    def _run_prefill(self, piece: PrefillSlice) -> bool:
        limits = self._limits
        _require(0 <= piece.slot < limits.max_streams, f"slot {piece.slot} does not exist")
        if piece.start is not None:
            _require(piece.slot not in self._slots, f"slot {piece.slot} started without a release")
            self._slots[piece.slot] = _Slot(piece.start)
            self._sampler.start(piece.slot, piece.start)
        _require(piece.slot in self._slots, f"slot {piece.slot} has no start")
        slot = self._slots[piece.slot]
        others = [other for other, state in self._slots.items() if state.chunk and other != piece.slot]
        _require(not others, f"prefill of slot {piece.slot} inside a chunk of slot {others}")
        slot.check_slice(piece, limits)
        end = piece.start_position + len(piece.token_ids)
        self._take_pages(piece.slot, piece.page_ids, end)
        layers = range(piece.layer_begin, piece.layer_end)
        self._memory.write(layers, piece.page_ids, piece.start_position, piece.token_ids)
        slot.next_layer = piece.layer_end
        slot.chunk = piece.token_ids
        if piece.layer_end < limits.num_layers:
            return False
        slot.next_layer = 0
        slot.chunk = ()
        slot.num_computed = end
        slot.is_prefilled = piece.is_last_chunk
        return True

    def _run_decode(self, row: DecodeRow) -> None:
        _require(row.slot in self._slots, f"decode in slot {row.slot}, which holds nothing")
        slot = self._slots[row.slot]
        _require(slot.is_prefilled, f"decode in slot {row.slot} before the end of its prefill")
        _require(row.position == slot.num_computed, f"position {row.position}, expected {slot.num_computed}")
        _require(
            row.position < self._limits.max_context_tokens, f"position {row.position} is past the context"
        )
        _require(row.token_id == slot.tokens[-1], f"token {row.token_id}, expected {slot.tokens[-1]}")
        self._take_pages(row.slot, row.page_ids, row.position + 1)
        self._memory.write(range(self._limits.num_layers), row.page_ids, row.position, (row.token_id,))
        slot.num_computed += 1

    def _take_pages(self, slot_id: int, page_ids: tuple[int, ...], num_tokens: int) -> None:
        """Check a sequence's page list: long enough, only ever extended, shared with nobody."""
        slot = self._slots[slot_id]
        _require(len(set(page_ids)) == len(page_ids), f"slot {slot_id} lists a page twice")
        _require(all(0 <= page < self._limits.num_pages for page in page_ids), "a page id out of range")
        _require(len(page_ids) * self._limits.page_tokens >= num_tokens, f"slot {slot_id} has too few pages")
        _require(page_ids[: len(slot.page_ids)] == slot.page_ids, f"the pages of slot {slot_id} changed")
        for other_id, other in self._slots.items():
            is_shared = other_id != slot_id and not set(other.page_ids).isdisjoint(page_ids)
            _require(not is_shared, f"slots {slot_id} and {other_id} share a page")
        slot.page_ids = page_ids

    def _sample(self, slot_ids: list[int]) -> tuple[SampledToken, ...]:
        if not slot_ids:
            return ()
        slots = [self._slots[slot_id] for slot_id in slot_ids]
        logits = np.stack([self._logits(slot, slot.num_computed) for slot in slots])
        sampled = self._sampler.sample(slot_ids, logits)
        for token in sampled:
            if token.error is None:
                self._slots[token.slot].tokens.append(token.token_id)
        return tuple(sampled)

    def _judge_prompt(self, piece: PrefillSlice) -> tuple[TokenLogprobs, ...]:
        begin, end = piece.start_position, piece.start_position + len(piece.token_ids)
        positions = self._sampler.prompt_positions(piece.slot, begin, end)
        if not positions:
            return ()
        slot = self._slots[piece.slot]
        logits = np.stack([self._logits(slot, position) for position in positions])
        return tuple(self._sampler.judge_prompt(piece.slot, positions, logits))

    def _logits(self, slot: _Slot, num_tokens: int) -> NDArray[np.float32]:
        """Give the logits after the first num_tokens tokens; a script says nothing of the prompt."""
        tokens = self._memory.read(slot.page_ids, num_tokens)
        expected = np.array(slot.tokens[:num_tokens], dtype=np.int64)
        _require(np.array_equal(tokens, expected), f"the pages of {slot.request_id} hold other tokens")
        script = self._scripts.get(slot.request_id)
        if script is None or num_tokens < slot.num_prompt:
            generator = np.random.Generator(np.random.Philox(key=zlib.crc32(tokens.tobytes())))
            return generator.standard_normal(self._limits.vocab_size, dtype=np.float32)
        logits = np.zeros(self._limits.vocab_size, dtype=np.float32)
        index = num_tokens - slot.num_prompt
        peak = script[index] if index < len(script) else self._limits.eos_token_ids[0]
        logits[peak] = SCRIPTED_LOGIT
        return logits

    def _stats(self, plan: StepPlan) -> StepStats:
        costs, piece = self._costs, plan.prefill
        layers = range(0) if piece is None else range(piece.layer_begin, piece.layer_end)
        layers_s = tuple(costs.layer_s(layer, piece) for layer in layers if piece is not None)
        decode_s = costs.decode_row_s * len(plan.decode)
        return StepStats(sum(layers_s), decode_s, layers_s if costs.tells_layers else ())


class PagedMemory:
    """One cell per layer, page and offset, holding the token id written there; -1 when never written."""

    def __init__(self, limits: EngineLimits) -> None:
        shape = (limits.num_layers, limits.num_pages, limits.page_tokens)
        self._cells = np.full(shape, -1, dtype=np.int64)
        self._page_tokens = limits.page_tokens

    def write(self, layers: range, page_ids: Sequence[int], position: int, token_ids: Sequence[int]) -> None:
        """Write tokens at positions position, position + 1, ... of some layers."""
        positions = np.arange(position, position + len(token_ids))
        pages = np.array(page_ids)[positions // self._page_tokens]
        self._cells[layers.start : layers.stop, pages, positions % self._page_tokens] = token_ids

    def read(self, page_ids: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
        """Read a sequence's first tokens, int64 (num_tokens,). Raises ContractViolation if layers differ."""
        cells = self._cells[:, list(page_ids)].reshape(len(self._cells), -1)[:, :num_tokens]
        _require(bool((cells == cells[0]).all()), f"pages {page_ids} hold different tokens in their layers")
        tokens: NDArray[np.int64] = cells[0].copy()
        return tokens


class _Slot:
    """One sequence as the engine sees it."""

    def __init__(self, start: SequenceStart) -> None:
        self.request_id = start.request_id
        self.num_prompt = len(start.prompt_ids)
        self.tokens = [*start.prompt_ids, *start.output_ids]
        self.num_prefill = len(self.tokens)
        self.page_ids: tuple[int, ...] = ()
        self.num_computed = 0
        self.next_layer = 0
        self.chunk: tuple[int, ...] = ()  # the chunk in progress; empty between chunks
        self.is_prefilled = False

    def check_slice(self, piece: PrefillSlice, limits: EngineLimits) -> None:
        """Compare a slice with what must come next. Raises ContractViolation."""
        begin, end = piece.start_position, piece.start_position + len(piece.token_ids)
        _require(not self.is_prefilled, f"slot {piece.slot} is prefilled already")
        _require(begin == self.num_computed, f"chunk at {begin}, expected {self.num_computed}")
        _require(piece.token_ids == tuple(self.tokens[begin:end]), "the chunk holds other tokens")
        _require(
            0 < len(piece.token_ids) <= limits.max_chunk_tokens, f"{len(piece.token_ids)} tokens in a chunk"
        )
        _require(end <= limits.max_context_tokens, f"a chunk ends at {end}, past the context")
        _require(not self.chunk or piece.token_ids == self.chunk, "the chunk changed between its layers")
        _require(
            piece.layer_begin == self.next_layer, f"layer {piece.layer_begin}, expected {self.next_layer}"
        )
        _require(piece.layer_begin < piece.layer_end <= limits.num_layers, f"layer_end {piece.layer_end}")
        is_last = end == self.num_prefill
        _require(piece.is_last_chunk == is_last, f"is_last_chunk {piece.is_last_chunk}, expected {is_last}")
        is_first = begin == 0 and piece.layer_begin == 0
        _require((piece.start is not None) == is_first, "start belongs to the first slice, and only there")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ContractViolation(text)
