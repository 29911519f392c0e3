"""Runs whole sequences through an engine without a scheduler: one prefill, then decode steps in lockstep.

For panels and comparisons, where every token is known beforehand or follows greedily, and every position is
to be judged. Nothing is shared: each sequence has its own slot and its own run of pages from its start.

    driver = EngineDriver(engine)
    opened = driver.open([ids, ...], num_top=20)      prefill, one sequence after the other
    step = driver.decode(tokens)                      one token of each; what comes after it is judged
    driver.release()
"""

from __future__ import annotations

from collections.abc import Sequence

from glm53srv.engine.base import DecodeRow, Engine, PrefillSlice, SampledToken, SequenceStart, StepPlan
from glm53srv.errors import ConfigError
from glm53srv.request import PromptLogprobs, SamplingParams, TokenLogprobs


class EngineDriver:
    """Drives one engine that nobody else uses, on the engine's thread; at most max_streams sequences."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next_step_id = 0
        self._pages_per_slot = 0
        self._positions: list[int] = []

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_top: int,
        room_tokens: int = 0,
        first_judged: int | None = None,
    ) -> list[list[TokenLogprobs]]:
        """Prefill sequences into the slots 0, 1, ...; gives what the engine says of each.

        room_tokens: how many tokens decode() will add. The answer for a prompt has one entry per judged
        prompt position, those from first_judged on (None: none of them), and last the one of the token after
        the prompt, sampled greedily. num_top: most likely ids with each. Raises ConfigError when the engine
        has no room, EngineError when it fails.
        """
        limits = self._engine.limits
        longest = max(len(prompt) for prompt in prompts) + room_tokens
        self._pages_per_slot = -(-longest // limits.page_tokens)
        if len(prompts) > limits.max_streams or self._pages_per_slot * len(prompts) > limits.num_pages:
            raise ConfigError(
                f"{len(prompts)} sequences of {longest} tokens do not fit: the engine has "
                f"{limits.max_streams} streams and room for {limits.num_pages * limits.page_tokens} tokens; "
                "raise --cache-tokens"
            )
        if longest > limits.max_context_tokens:
            raise ConfigError(
                f"a sequence of {longest} tokens is longer than the context of {limits.max_context_tokens}"
            )
        self._positions = [len(prompt) for prompt in prompts]
        return [
            self._prefill(slot, tuple(prompt), num_top, first_judged) for slot, prompt in enumerate(prompts)
        ]

    def decode(self, tokens: Sequence[int]) -> list[SampledToken]:
        """Append a token to each sequence; gives what would follow greedily, with log probabilities."""
        rows = tuple(
            DecodeRow(slot, token, position, self._page_ids(slot))
            for slot, (token, position) in enumerate(zip(tokens, self._positions, strict=True))
        )
        result = self._engine.step(StepPlan(self._take_step_id(), decode=rows))
        self._positions = [position + 1 for position in self._positions]
        return list(result.tokens)

    def release(self) -> None:
        """Forget all sequences."""
        self._engine.step(StepPlan(self._take_step_id(), release=tuple(range(len(self._positions)))))
        self._positions = []

    def _prefill(
        self, slot: int, prompt: tuple[int, ...], num_top: int, first_judged: int | None
    ) -> list[TokenLogprobs]:
        limits = self._engine.limits
        judged = None if first_judged is None else PromptLogprobs(max(first_judged, 1), num_top)
        sampling = SamplingParams(temperature=0.0, num_logprobs=num_top, ignore_eos=True)
        start = SequenceStart(f"sequence-{slot}", sampling, 0, prompt, prompt_logprobs=judged)
        told: list[TokenLogprobs] = []
        for begin in range(0, len(prompt), limits.max_chunk_tokens):
            end = min(begin + limits.max_chunk_tokens, len(prompt))
            piece = PrefillSlice(
                slot=slot,
                token_ids=prompt[begin:end],
                start_position=begin,
                page_ids=self._page_ids(slot),
                layer_begin=0,
                layer_end=limits.num_layers,
                is_last_chunk=end == len(prompt),
                start=start if begin == 0 else None,
            )
            result = self._engine.step(StepPlan(self._take_step_id(), prefill=piece))
            told += result.prompt_logprobs
            told += [token.logprobs for token in result.tokens if token.logprobs is not None]
        return told

    def _page_ids(self, slot: int) -> tuple[int, ...]:
        first = slot * self._pages_per_slot
        return tuple(range(first, first + self._pages_per_slot))

    def _take_step_id(self) -> int:
        self._next_step_id += 1
        return self._next_step_id - 1
