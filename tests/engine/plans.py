"""Drives an engine through whole sequences, one step per plan, and collects what it samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from glm53srv.engine.base import (
    DecodeRow,
    Engine,
    PrefillSlice,
    SampledToken,
    SequenceStart,
    StepPlan,
    StepResult,
)
from glm53srv.request import PromptLogprobs, SamplingParams, TokenLogprobs

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Stream:
    """One sequence on its way through an engine, in its own slot and on its own pages."""

    slot: int
    prompt: tuple[int, ...]
    page_ids: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    output: list[int] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    judged: list[TokenLogprobs] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"request-{self.slot}"

    def take(self, token: SampledToken) -> None:
        assert token.slot == self.slot
        self.tokens.append(token)
        self.output.append(token.token_id)

    def start(self) -> SequenceStart:
        return SequenceStart(
            self.request_id,
            self.sampling,
            self.seed,
            self.prompt,
            prompt_logprobs=self.prompt_logprobs,
        )

    def decode_row(self) -> DecodeRow:
        position = len(self.prompt) + len(self.output) - 1
        return DecodeRow(self.slot, self.output[-1], position, self.page_ids)

    def slices(self, engine: Engine, chunk: int, layer_cuts: Iterable[int] = ()) -> list[PrefillSlice]:
        """List the slices of the prompt, each chunk cut at the given layers."""
        num_layers = engine.limits.num_layers
        borders = [0, *layer_cuts, num_layers]
        pieces = []
        for first in range(0, len(self.prompt), chunk):
            ids = self.prompt[first : first + chunk]
            is_last = first + chunk >= len(self.prompt)
            for begin, end in pairwise(borders):
                start = self.start() if first == 0 and begin == 0 else None
                pieces.append(PrefillSlice(self.slot, ids, first, self.page_ids, begin, end, is_last, start))
        return pieces


class Driver:
    """Numbers the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next_step_id = 0

    def step(
        self,
        prefill: PrefillSlice | None = None,
        decode: Sequence[Stream] = (),
        release: Sequence[int] = (),
    ) -> StepResult:
        """Run one step without handing tokens out."""
        step_id = self._next_step_id
        self._next_step_id += 1
        rows = tuple(stream.decode_row() for stream in decode)
        result = self.engine.step(StepPlan(step_id, tuple(release), prefill, rows))
        assert result.step_id == step_id
        return result

    def prefill(
        self,
        stream: Stream,
        chunk: int | None = None,
        layer_cuts: Iterable[int] = (),
        beside: Sequence[Stream] = (),
    ) -> None:
        """Run a prompt to its first token; `beside` decodes one token in each of the steps."""
        pieces = stream.slices(self.engine, chunk or self.engine.limits.max_chunk_tokens, layer_cuts)
        for piece in pieces:
            result = self.step(piece, beside)
            is_end = piece.layer_end == self.engine.limits.num_layers
            assert result.prefill_done is is_end
            assert len(result.tokens) == len(beside) + (is_end and piece.is_last_chunk)
            stream.judged += result.prompt_logprobs
            for other, token in zip(beside, result.tokens, strict=False):
                other.take(token)
        stream.take(result.tokens[-1])

    def decode(self, streams: Sequence[Stream], num_steps: int) -> None:
        """Decode tokens of all streams together."""
        for _ in range(num_steps):
            result = self.step(decode=streams)
            for stream, token in zip(streams, result.tokens, strict=True):
                stream.take(token)

    def release(self, streams: Sequence[Stream]) -> None:
        """Give the slots back."""
        self.step(release=[stream.slot for stream in streams])
