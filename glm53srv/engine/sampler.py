"""Draw the next token of each sequence from its row of logits, on the engine thread.

What goes over the whole row is native (sampler_kernel.py): on a GPU engine nothing else runs meanwhile.

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
SC 2011) with the seed as key and i as counter. So neither batching nor preemption changes a token; nor does
the CPU, for the weights have the same bits in every instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm53srv.engine.base import SampledToken, SequenceStart
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.engine.penalties import Penalties, valid_ids
from glm53srv.engine.token_rules import TokenRules
from glm53srv.errors import EngineError
from glm53srv.request import TokenLogprobs
from glm53srv.sampler_kernel import SamplerKernel

LOGPROB_FLOOR = -9999.0
"""Reported in place of minus infinity, which JSON cannot hold; OpenAI's API does the same."""

Logits = NDArray[np.float32]


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

        grammars: compiles constraints; without it no request may have one. Raises MachineError if the native
        kernels are not built.
        """
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_valid_ids = vocab_size if num_valid_ids is None else num_valid_ids
        assert 0 < self._num_valid_ids <= vocab_size
        self._bench = _Bench(self._num_valid_ids)
        self._slots: dict[int, _SlotSampler] = {}

    def start(self, slot: int, start: SequenceStart) -> None:
        """Take a sequence into a free slot, with the tokens it already has.

        Raises GrammarError for a constraint that was never checked and does not compile.
        """
        assert slot not in self._slots, f"slot {slot} was not released"
        rules = self._rules_of(start)
        self._slots[slot] = _SlotSampler(start, self._eos_token_ids, self._bench, rules)

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
        return [sampler.judge_prompt(position, *self._checked(row)) for position, row in pairs]

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


class _Bench:
    """What the slots of a bank use in turn.

    row: float32 (num_ids,), room for a row that is changed; allocating one costs as much as a pass over it.
    """

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self.kernel = SamplerKernel(num_ids)
        self.row: Logits = np.empty(num_ids, dtype=np.float32)


class _SlotSampler:
    """One sequence's parameters and counts."""

    def __init__(
        self, start: SequenceStart, eos_token_ids: tuple[int, ...], bench: _Bench, rules: TokenRules | None
    ) -> None:
        params = start.sampling
        self._rules = rules
        self._params = params
        self._bench = bench
        self._seed = start.seed
        self._num_output = len(start.output_ids)
        self._prompt_ids = start.prompt_ids
        self._prompt_logprobs = start.prompt_logprobs
        stop_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + eos_token_ids
        self._stop_ids = valid_ids(stop_ids, bench.num_ids)
        self._penalties = Penalties(params, bench.num_ids, start.prompt_ids, start.output_ids)

    def sample(self, slot: int, row: Logits, best: int) -> SampledToken:
        """Draw from one checked row; best is its first largest id."""
        params = self._params
        if self._changes_logits:
            row, best = self._processed(row)
            if row[best] == -np.inf:
                return SampledToken(slot, best, error=self._dead_end())
        if params.temperature == 0.0 or params.top_k == 1:
            token_id = best
        else:
            u = uniform(self._seed, self._num_output)
            token_id = self._bench.kernel.draw(row, float(row[best]), params, u)
        logprobs = None
        if params.num_logprobs is not None:
            logprobs = self._logprobs(row, best, token_id, params.num_logprobs, params.logprob_token_ids)
        self._count(token_id)
        return SampledToken(slot, token_id, logprobs)

    def prompt_positions(self, chunk_begin: int, chunk_end: int) -> range:
        """Give the prompt positions that the chunk [begin, end) lets judge and the request asks for."""
        if self._prompt_logprobs is None:
            return range(0)
        return self._prompt_logprobs.positions_after(chunk_begin, chunk_end, len(self._prompt_ids))

    def judge_prompt(self, position: int, row: Logits, best: int) -> TokenLogprobs:
        """Give the log probabilities of one prompt token from a checked row; best is its first largest id."""
        wanted = self._prompt_logprobs
        assert wanted is not None, "nothing was asked for"
        return self._logprobs(row, best, self._prompt_ids[position], wanted.num_top, wanted.token_ids)

    @property
    def _is_banning(self) -> bool:
        return self._num_output < self._params.min_tokens and len(self._stop_ids) > 0

    @property
    def _changes_logits(self) -> bool:
        is_bound = self._rules is not None and self._rules.is_binding
        return is_bound or self._is_banning or not self._penalties.is_neutral

    def _dead_end(self) -> str:
        reason = None if self._rules is None else self._rules.error
        return f"the constraint allows no token here ({reason or 'the grammar has a dead end'})"

    def _processed(self, borrowed: Logits) -> tuple[Logits, int]:
        """Give a copy of the row after operations 2 to 5, with its first largest id.

        The copy is valid until the next one of any slot.
        """
        row = self._bench.row
        np.copyto(row, borrowed)
        self._penalties.apply(row)
        if self._rules is not None:
            self._rules.apply(row)
        if not self._is_banning:
            return row, int(row.argmax())
        kept = row[self._stop_ids]
        row[self._stop_ids] = -np.inf
        best = int(row.argmax())
        if row[best] == -np.inf:  # nothing but stop ids is left: a token must come out, the ban gives way
            row[self._stop_ids] = kept
            best = int(row.argmax())
        return row, best

    def _count(self, token_id: int) -> None:
        self._num_output += 1
        self._penalties.count(token_id)
        if self._rules is not None:
            self._rules.accept(token_id)

    def _logprobs(
        self, row: Logits, best: int, token_id: int, num_top: int, other_ids: tuple[int, ...]
    ) -> TokenLogprobs:
        """Take log softmax of logits at the token's id, at the num_top first of the ranking and at other ids.

        An id of the head's padding, which a prompt may hold, has the probability 0.
        """
        kernel, largest = self._bench.kernel, float(row[best])
        log_total = math.log(kernel.total(row, largest))

        def logprob(index: int) -> float:
            if index >= len(row):
                return LOGPROB_FLOOR
            return max(float(row[index]) - largest - log_total, LOGPROB_FLOOR)

        top = kernel.top(row, min(num_top, len(row))).tolist()
        return TokenLogprobs(
            logprob(token_id),
            tuple((index, logprob(index)) for index in top),
            tuple((index, logprob(index)) for index in other_ids),
        )


def uniform(seed: int, index: int) -> float:
    """Give the number in [0, 1) that decides token `index` of a sequence with this 64-bit seed."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
