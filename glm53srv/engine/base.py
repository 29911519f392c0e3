"""The contract between the step loop and an engine: one call executes one step.

A step is at most one slice of one sequence's prefill, then one decode step of the running sequences, in that
order. Prefill is resumable between layers: a chunk of prompt tokens may span several steps, each running the
half-open range [layer_begin, layer_end) of its layers. The pieces of a chunk follow each other without a
gap, and no other sequence's prefill comes between them; decode rows of other sequences may.

    chunk of 512 tokens, 8 layers     step 7: layers [0, 3)  + decode
                                      step 8: layers [3, 6)  + decode
                                      step 9: layers [6, 8)  + decode      -> prefill_done
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from glm53srv.request import PromptLogprobs, SamplingParams, TokenLogprobs

if TYPE_CHECKING:  # numpy: not before the port is open
    from glm53srv.offload.report import OffloadReport


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold. All sizes in tokens, pages or layers; fixed for the engine's life.

    max_streams: slots, each with its recurrent state. max_context_tokens: longest sequence, prompt and
    output. page_tokens * num_pages is the room of the paged cache, shared by all slots. num_layers: the
    places between which a prefill may pause.
    """

    max_streams: int
    max_context_tokens: int
    max_chunk_tokens: int
    page_tokens: int
    num_pages: int
    num_layers: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """What an engine needs to know once about a sequence: it comes with the first slice in a slot.

    prompt_ids: the whole prompt. output_ids: tokens already sampled, not empty when a preempted sequence is
    computed again (its prefill then covers prompt and output). seed: 64-bit, resolved; token i of the output
    is drawn from (seed, i) alone, so that it depends neither on batching nor on preemption. prompt_logprobs:
    the positions to judge, without those that an earlier run of a preempted sequence has told.
    """

    request_id: str
    sampling: SamplingParams
    seed: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Layers [layer_begin, layer_end) of one chunk of one sequence.

    token_ids: the chunk. start_position: position of its first token. page_ids: the sequence's pages in
    order, enough for start_position + len(token_ids) tokens. start: set in the first slice of a sequence
    (position 0, layer 0). is_last_chunk: after the last layer the next token is sampled and returned for
    this slot.
    """

    slot: int
    token_ids: tuple[int, ...]
    start_position: int
    page_ids: tuple[int, ...]
    layer_begin: int
    layer_end: int
    is_last_chunk: bool
    start: SequenceStart | None = None


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's next step: token_id is written at `position` and the token after it is sampled.

    page_ids: the sequence's pages in order, enough for position + 1 tokens.
    """

    slot: int
    token_id: int
    position: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. release: slots to forget first (an unknown slot is ignored)."""

    step_id: int
    release: tuple[int, ...] = ()
    prefill: PrefillSlice | None = None
    decode: tuple[DecodeRow, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn for a slot in this step.

    error: this sequence cannot go on (its grammar outgrew its limits), one line; token_id then has no
    meaning. The others do not suffer.
    """

    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Wall seconds of the two parts of a step, 0 for a part that was absent.

    Source of the scheduler's cost model. layers_s: of each layer of the prefill slice, in order, or empty
    from an engine that cannot tell them apart.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    layers_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of StepPlan `step_id`.

    tokens: one per decode row, in plan order, then one for a prefill slice that ended its last chunk.
    prefill_done: the slice ran its last layer. prompt_logprobs: then, those of the positions that
    SequenceStart.prompt_logprobs.positions_after(chunk) names, in order; else empty.
    """

    step_id: int
    tokens: tuple[SampledToken, ...]
    prefill_done: bool
    stats: StepStats
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Engine(Protocol):
    """Executes steps. Every call comes from the one engine thread, in plan order."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def offload_report(self) -> OffloadReport | None:
        """The expert cache as of the last step, None without one. Alone in this, any thread may read it."""

    def warm_up(self) -> None:
        """Run every shape once, so that the first request is not slower than the second."""

    def step(self, plan: StepPlan) -> StepResult:
        """Execute one step. Raises EngineError; after that only close() may follow."""

    def close(self) -> None:
        """Free what the engine holds. Idempotent."""
