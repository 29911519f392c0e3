"""One sequence: its tokens, what of them is computed, what it holds, and its state.

    state        may become                            by
    QUEUED       PREFILLING                            admit (takes a slot)
    PREFILLING   DECODING                              the last chunk of its tokens is computed
    PREFILLING   QUEUED                                preempt (loses slot and pages, keeps its tokens)
    DECODING     QUEUED                                preempt
    DECODING     FINISHED                              a stop id, max_tokens, the end of the context
    live states  FINISHED                              the service ends it at a stop string
    live states  ABORTED                               the client left, or the server drains or failed

QUEUED, PREFILLING and DECODING are the live states; the other two are final.

One counter serves prefill and decode:

    position   0                       num_prompt              num_tokens
    tokens     | prompt                | output                |
    cache      | computed               ...    | to compute    |
                                               num_computed_tokens

A decoding sequence has exactly one token to compute, the one sampled last. A preempted one has computed
nothing and prefills prompt and output again; its output continues where it stopped.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from glm53srv.engine.base import SequenceStart
from glm53srv.request import FinishReason, GenerationRequest, PromptLogprobs, PromptNews, TokenLogprobs


class SequenceState(enum.Enum):
    """See the table at the head of this file."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


LIVE_STATES = frozenset({SequenceState.QUEUED, SequenceState.PREFILLING, SequenceState.DECODING})


class Sequence:
    """The scheduler's record of one request. Owned and changed by Scheduler alone, read by the step loop.

    Times are seconds of the scheduler's clock; None until the event has happened. turn: its place in the
    round of prefills, smallest first: the step that admitted it, or one after that of its last chunk.
    num_cached_tokens: tokens whose cache came from an earlier request; 0 while there is no prefix cache.
    """

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...],
        max_output_tokens: int,
        submitted_s: float,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.seed = seed
        self.max_output_tokens = max_output_tokens
        sampling = request.sampling
        self._stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))
        self.state = SequenceState.QUEUED
        self.slot: int | None = None
        self.output_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self._num_told = 0  # prompt positions whose log probabilities went to the reader
        self.turn = -1
        self.submitted_s = submitted_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.token_gap_s: float | None = None  # between its two newest tokens
        self._page_ids: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def page_ids(self) -> tuple[int, ...]:
        """Its pages in order of position."""
        return self._page_ids

    @property
    def last_token_id(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.request.prompt_ids[-1]

    def tokens_between(self, begin: int, end: int) -> tuple[int, ...]:
        """Give the token ids of positions [begin, end)."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[begin:end]
        output = self.output_ids[max(begin - len(prompt), 0) : end - len(prompt)]
        return prompt[begin:] + tuple(output)

    def chunk_end(self, max_chunk_tokens: int) -> int:
        """Give the end of the chunk that begins at num_computed_tokens.

        Chunks end on multiples of max_chunk_tokens and at the last token: a function of the sequence alone,
        so that no result depends on load. A short last chunk stays short: it reads fewer experts than two
        even ones would, and ends on the grid are the same for every prompt with the same beginning.
        """
        grid = (self.num_computed_tokens // max_chunk_tokens + 1) * max_chunk_tokens
        return min(grid, self.num_tokens)

    def start(self) -> SequenceStart:
        """Give what the engine must know at the first slice."""
        request = self.request
        return SequenceStart(
            request.request_id,
            request.sampling,
            self.seed,
            request.prompt_ids,
            tuple(self.output_ids),
            self._untold_logprobs(),
        )

    def _untold_logprobs(self) -> PromptLogprobs | None:
        """Give what the reader has not been told yet of the prompt: all of it but after a preemption."""
        wanted = self.request.prompt_logprobs
        if wanted is None:
            return None
        return replace(wanted, start_position=wanted.start_position + self._num_told)

    def prompt_positions(self, chunk_begin: int, chunk_end: int) -> range:
        """Give the prompt positions that the engine must judge with the chunk [begin, end)."""
        wanted = self._untold_logprobs()
        if wanted is None:
            return range(0)
        return wanted.positions_after(chunk_begin, chunk_end, self.num_prompt_tokens)

    def prompt_news(self, logprobs: tuple[TokenLogprobs, ...], now_s: float) -> PromptNews | None:
        """Note what a chunk that is done has told of the prompt; gives the reader's news, if it asked."""
        self._num_told += len(logprobs)
        is_prompt = self.request.reports_prompt and not self.output_ids
        if not logprobs and not is_prompt:
            return None
        elapsed_s = now_s - (self.first_scheduled_s or now_s)
        return PromptNews(min(self.num_computed_tokens, self.num_prompt_tokens), elapsed_s, logprobs)

    def admit(self, slot: int, turn: int, now_s: float) -> None:
        """QUEUED to PREFILLING."""
        assert self.state is SequenceState.QUEUED
        self.state = SequenceState.PREFILLING
        self.slot = slot
        self.turn = turn
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s

    def add_pages(self, page_ids: tuple[int, ...]) -> None:
        self._page_ids += page_ids

    def drop_cache(self) -> tuple[int, ...]:
        """Give up the pages and what was computed in them; returns the page ids."""
        page_ids, self._page_ids = self._page_ids, ()
        self.num_computed_tokens = 0
        return page_ids

    def preempt(self) -> None:
        """PREFILLING or DECODING to QUEUED. The pages must have been dropped."""
        assert self.state in (SequenceState.PREFILLING, SequenceState.DECODING)
        assert not self._page_ids
        self.state = SequenceState.QUEUED
        self.slot = None
        self.num_preemptions += 1

    def begin_decoding(self) -> None:
        """PREFILLING to DECODING, once every token is computed."""
        assert self.state is SequenceState.PREFILLING
        assert self.num_computed_tokens == self.num_tokens
        self.state = SequenceState.DECODING

    def end(self, state: SequenceState) -> None:
        """Any live state to a final one. Slot and pages must have been dropped by the scheduler."""
        assert self.is_live
        assert not self._page_ids
        self.state = state
        self.slot = None

    def add_token(self, token_id: int, now_s: float) -> tuple[FinishReason | None, bool]:
        """Append a sampled token; returns why the sequence ends, if it does, and whether it is a stop id.

        A stop id counts once min_tokens tokens came before it (the sampler bans it until then). The context
        is full when max_output_tokens, which was clamped to it, is reached.
        """
        assert self.state is SequenceState.DECODING
        num_before = len(self.output_ids)
        self.output_ids.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.last_token_s is not None:
            self.token_gap_s = now_s - self.last_token_s
        self.last_token_s = now_s
        if token_id in self._stop_ids and num_before >= self.request.sampling.min_tokens:
            return FinishReason.STOP, True
        if len(self.output_ids) >= self.max_output_tokens:
            return FinishReason.LENGTH, False
        return None, False
