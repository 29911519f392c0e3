"""Draw the next token of each sequence from its row of logits; numpy only, on the engine thread.

One row goes through these operations, in this order:

    1. ids without a meaning      the padding of the head (id >= num_valid_ids) is cut off
    2. repetition penalty         ids of prompt and output: a positive logit is divided, a negative multiplied
    3. frequency, presence        ids of the output: minus count * frequency, minus presence
    4. logit_bias                 added
    5. bans                       what token_rules.py excludes; stop ids while fewer than min_tokens are out
    6. log probabilities          log softmax of what is left; reported, not used by the draw
    7. temperature                0: the largest logit, the lowest id among equals; then nothing below applies
    8. top_k, top_p, min_p        each on what the one before it left
    9. draw                       inverse of the cumulative weights, in id order, float64

Ties are decided, never left to a sort: ids are ranked by (logit descending, id ascending). top_k keeps
exactly k ids of that ranking; top_p keeps its shortest prefix that holds at least top_p of the weight; min_p
keeps the weights of at least min_p times the largest.

Token i of an output is a function of (seed, i), the row and the tokens before it: the uniform number comes
from a counter-based generator (Philox4x64-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) with the seed as key and i as counter. So neither batching nor preemption changes a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from glm53srv.engine.base import SampledToken, SequenceStart
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.engine.token_rules import TokenRules
from glm53srv.errors import EngineError
from glm53srv.request import SamplingParams, TokenLogprobs

LOGPROB_FLOOR = -9999.0
"""Reported in place of minus infinity, which JSON cannot hold; OpenAI's API does the same."""

NUM_GROUPS = 1024
"""Groups of logits whose maxima bound a small top_k."""

IdArray = NDArray[np.int64]
Logits = NDArray[np.float32]
Weights = NDArray[np.float64]


class SamplerBank:
    """The sampling state of every slot. Owned by an engine, used from the engine thread only.

    Invariant: a slot's counts describe SequenceStart.output_ids plus every token sampled for it since.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_valid_ids: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Make a bank without slots. Ids from num_valid_ids on are never drawn; None: all are valid.

        grammars: compiles constraints; without it no request may have one.
        """
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_valid_ids = vocab_size if num_valid_ids is None else num_valid_ids
        assert 0 < self._num_valid_ids <= vocab_size
        self._slots: dict[int, _SlotSampler] = {}

    def start(self, slot: int, start: SequenceStart) -> None:
        """Take a sequence into a free slot, with the tokens it already has.

        Raises GrammarError for a constraint that was never checked and does not compile.
        """
        assert slot not in self._slots, f"slot {slot} was not released"
        rules = self._rules_of(start)
        self._slots[slot] = _SlotSampler(start, self._eos_token_ids, self._num_valid_ids, rules)

    def release(self, slot: int) -> None:
        """Forget a slot; an unknown one is ignored."""
        self._slots.pop(slot, None)

    def sample(self, slots: Sequence[int], logits: Logits) -> list[SampledToken]:
        """Draw one token per slot and count it as output.

        logits: float32 (len(slots), vocab_size), CPU, rows contiguous; read only, borrowed for the call.
        Raises EngineError when a row has a NaN, a plus infinity or nothing finite.
        """
        assert logits.shape == (len(slots), self._vocab_size), f"logits of shape {logits.shape}"
        return [self._sample_row(slot, row) for slot, row in zip(slots, logits, strict=True)]

    def _rules_of(self, start: SequenceStart) -> TokenRules | None:
        params = start.sampling
        matcher = None
        if params.constraint is not None:
            assert self._grammars is not None, "a constraint, but nothing to compile it"
            matcher = self._grammars.matcher(params.constraint)
        if matcher is None and params.reasoning is None:
            return None
        return TokenRules(params.reasoning, matcher, self._eos_token_ids, start.output_ids)

    def prompt_positions(self, slot: int, chunk_begin: int, chunk_end: int) -> range:
        """Give the prompt positions to judge once the chunk [begin, end) of a slot is computed."""
        return self._slots[slot].prompt_positions(chunk_begin, chunk_end)

    def judge_prompt(self, slot: int, positions: range, logits: Logits) -> list[TokenLogprobs]:
        """Give the log probabilities of the prompt tokens at `positions`, from the bare logits.

        logits: float32 (len(positions), vocab_size), row i those of the token before positions[i]; read
        only, borrowed for the call. Raises EngineError as sample() does.
        """
        assert logits.shape == (len(positions), self._vocab_size), f"logits of shape {logits.shape}"
        sampler = self._slots[slot]
        pairs = zip(positions, logits, strict=True)
        return [sampler.judge_prompt(position, self._checked(row)[0]) for position, row in pairs]

    def _sample_row(self, slot: int, row: Logits) -> SampledToken:
        row, best = self._checked(row)
        return self._slots[slot].sample(slot, row, best)

    def _checked(self, row: Logits) -> tuple[Logits, int]:
        """Cut the padding off a row; gives it with its first largest id."""
        row = row[: self._num_valid_ids]
        best = int(row.argmax())  # the first NaN if there is one
        if not math.isfinite(row[best]):
            raise EngineError(
                f"the model gave non-finite logits ({row[best]} at id {best}); check the weights"
            )
        return row, best


class _SlotSampler:
    """One sequence's parameters and counts."""

    def __init__(
        self, start: SequenceStart, eos_token_ids: tuple[int, ...], num_ids: int, rules: TokenRules | None
    ) -> None:
        params = start.sampling
        self._rules = rules
        self._params = params
        self._seed = start.seed
        self._num_output = len(start.output_ids)
        self._num_ids = num_ids
        self._prompt_ids = start.prompt_ids
        self._prompt_logprobs = start.prompt_logprobs
        stop_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + eos_token_ids
        self._stop_ids = self._valid(stop_ids)
        self._bias = np.zeros(num_ids, dtype=np.float32) if params.logit_bias else None
        if self._bias is not None:
            for token_id, bias in params.logit_bias:
                if 0 <= token_id < num_ids:
                    self._bias[token_id] += bias
        self._counts: NDArray[np.int32] | None = None
        self._is_seen: NDArray[np.bool_] | None = None
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._counts = np.bincount(self._valid(start.output_ids), minlength=num_ids).astype(np.int32)
        if params.repetition_penalty != 1.0:
            self._is_seen = np.zeros(num_ids, dtype=np.bool_)
            self._is_seen[self._valid(start.prompt_ids)] = True
            self._is_seen[self._valid(start.output_ids)] = True

    def sample(self, slot: int, row: Logits, best: int) -> SampledToken:
        """Draw from one checked row; best is its first largest id."""
        params = self._params
        if self._changes_logits:
            row = self._processed(row)
            best = int(row.argmax())
            if row[best] == -np.inf:
                return SampledToken(slot, best, error=self._dead_end())
        if params.temperature == 0.0 or params.top_k == 1:
            token_id = best
        else:
            token_id = _draw(row, params, float(row[best]), uniform(self._seed, self._num_output))
        logprobs = None
        if params.num_logprobs is not None:
            logprobs = _token_logprobs(row, token_id, params.num_logprobs, params.logprob_token_ids)
        self._count(token_id)
        return SampledToken(slot, token_id, logprobs)

    def prompt_positions(self, chunk_begin: int, chunk_end: int) -> range:
        """Give the prompt positions that the chunk [begin, end) lets judge and the request asks for."""
        if self._prompt_logprobs is None:
            return range(0)
        return self._prompt_logprobs.positions_after(chunk_begin, chunk_end, len(self._prompt_ids))

    def judge_prompt(self, position: int, row: Logits) -> TokenLogprobs:
        """Give the log probabilities of one prompt token from a checked row."""
        wanted = self._prompt_logprobs
        assert wanted is not None, "nothing was asked for"
        return _token_logprobs(row, self._prompt_ids[position], wanted.num_top, wanted.token_ids)

    @property
    def _is_banning(self) -> bool:
        return self._num_output < self._params.min_tokens and len(self._stop_ids) > 0

    @property
    def _changes_logits(self) -> bool:
        has_terms = self._counts is not None or self._is_seen is not None or self._bias is not None
        return has_terms or self._is_banning or (self._rules is not None and self._rules.is_binding)

    def _dead_end(self) -> str:
        reason = None if self._rules is None else self._rules.error
        return f"the constraint allows no token here ({reason or 'the grammar has a dead end'})"

    def _processed(self, borrowed: Logits) -> Logits:
        """Give a copy of the row after operations 2 to 5."""
        row = borrowed.copy()
        params = self._params
        if self._is_seen is not None:
            seen = row[self._is_seen]
            row[self._is_seen] = np.where(
                seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
            )
        if self._counts is not None:
            row -= np.float32(params.frequency_penalty) * self._counts
            row -= np.float32(params.presence_penalty) * (self._counts > 0)
        if self._bias is not None:
            row += self._bias
        if self._rules is not None:
            self._rules.apply(row)
        if self._is_banning:
            kept = row[self._stop_ids]
            row[self._stop_ids] = -np.inf
            if row.max() == -np.inf:  # nothing but stop ids is left: a token must come out, the ban gives way
                row[self._stop_ids] = kept
        return row

    def _count(self, token_id: int) -> None:
        self._num_output += 1
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._is_seen is not None:
            self._is_seen[token_id] = True
        if self._rules is not None:
            self._rules.accept(token_id)

    def _valid(self, ids: Iterable[int]) -> IdArray:
        array = np.fromiter(ids, dtype=np.int64)
        return array[(array >= 0) & (array < self._num_ids)]


def uniform(seed: int, index: int) -> float:
    """Give the number in [0, 1) that decides token `index` of a sequence with this 64-bit seed."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def _draw(row: Logits, params: SamplingParams, largest: float, u: float) -> int:
    """Draw an id by operations 7 to 9. row: processed logits (ids,); largest: their maximum; u in [0, 1)."""
    ids: IdArray | None = None  # ascending; None stands for all of them
    if 0 < params.top_k < len(row):
        ids = _top_k_ids(row, params.top_k)
        row = row[ids]
    if params.top_p < 1.0:
        kept = _top_p_ids(row, largest, params.temperature, params.top_p)
        ids = kept if ids is None else ids[kept]
        row = row[kept]
    weights = _weights(row, largest, params.temperature)
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0  # the largest weight is exp(0) = 1
    index = _inverse_cdf(weights, u)
    return index if ids is None else int(ids[index])


def _weights(logits: Logits, largest: float, temperature: float) -> Weights:
    """Give exp((logit - largest) / temperature), float64: 1 for the largest, 0 for minus infinity."""
    with np.errstate(
        over="ignore", under="ignore"
    ):  # a tiny temperature sends the rest to zero, as it should
        scaled: Weights = (logits.astype(np.float64) - largest) / temperature
        return np.exp(scaled, out=scaled)


def _top_k_ids(row: Logits, top_k: int) -> IdArray:
    """Give exactly top_k ids, ascending: the first of the ranking. Partitions, never sorts."""
    return _first_of_ranking(row, _largest(row, top_k), top_k)


def _largest(row: Logits, rank: int) -> np.float32:
    """Give the rank-th largest logit, counted from 1.

    The rank-th largest of the groups' maxima is a bound below which it cannot lie, and few logits reach it:
    of 154,880 normal logits the 1st, 20th and 256th take 0.11 to 0.12 ms so and 0.8 to 0.9 ms by partition
    (2.4 GHz Zen 3, busy, least of 7).
    """
    size = len(row) // NUM_GROUPS
    if rank * 4 <= NUM_GROUPS and size > 1:
        maxima = row[: size * NUM_GROUPS].reshape(size, NUM_GROUPS).max(axis=0)
        row = row[row >= np.partition(maxima, NUM_GROUPS - rank)[NUM_GROUPS - rank]]
    value: np.float32 = np.partition(row, len(row) - rank)[len(row) - rank]
    return value


def _top_p_ids(row: Logits, largest: float, temperature: float, top_p: float) -> IdArray:
    """Give the ids of the shortest prefix of the ranking with at least top_p of the weight, ascending.

    Only ids of at least (1 - top_p) / (number of ids) of the weight are sorted: all the others together hold
    less than 1 - top_p, so the prefix ends before them. That leaves few ids of a row as models give them.
    """
    weights = _weights(row, largest, temperature)
    total = float(weights.sum())
    candidates = row[weights >= (1.0 - top_p) * total / len(row)]
    ranked = np.sort(candidates)[::-1]  # values, not ids: five times faster than ranking ids, and ties below
    cumulative = np.cumsum(_weights(ranked, largest, temperature))
    count = min(int(np.searchsorted(cumulative, top_p * total, side="left")) + 1, len(ranked))
    return _first_of_ranking(row, ranked[count - 1], count)


def _first_of_ranking(row: Logits, threshold: np.float32, count: int) -> IdArray:
    """Give the first `count` ids of the ranking, ascending. threshold: the logit of the last of them."""
    ids = np.flatnonzero(row >= threshold)
    num_extra = len(ids) - count
    if num_extra > 0:  # ties at the threshold: the highest ids go
        tied = np.flatnonzero(row[ids] == threshold)
        ids = np.delete(ids, tied[len(tied) - num_extra :])
    return ids


def _inverse_cdf(weights: Weights, u: float) -> int:
    """Give the index whose share of the cumulative weight holds u; never one of weight zero."""
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1])
    last = int(np.searchsorted(cumulative, total, side="left"))  # u * total may round up to total
    return min(int(np.searchsorted(cumulative, u * total, side="right")), last)


def _token_logprobs(
    row: Logits, token_id: int, num_top: int, other_ids: tuple[int, ...] = ()
) -> TokenLogprobs:
    """Take log softmax of logits at the token's id, at the num_top first of the ranking and at other ids.

    An id of the head's padding, which a prompt may hold, has the probability 0.
    """
    shifted = row.astype(np.float64) - float(row.max())
    log_total = math.log(float(np.exp(shifted).sum()))

    def logprob(index: int) -> float:
        if index >= len(shifted):
            return LOGPROB_FLOOR
        return max(float(shifted[index]) - log_total, LOGPROB_FLOOR)

    top = np.arange(0)
    if num_top > 0:
        top = _top_k_ids(row, min(num_top, len(row)))
        top = top[np.argsort(-row[top], kind="stable")]
    return TokenLogprobs(
        logprob(token_id),
        tuple((index, logprob(index)) for index in top.tolist()),
        tuple((index, logprob(index)) for index in other_ids),
    )
