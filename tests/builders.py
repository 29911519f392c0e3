"""Small values for tests: limits, requests, starts. Every default is the dullest that works."""

from __future__ import annotations

from collections.abc import Sequence

from glm53srv.engine.base import EngineLimits, SequenceStart
from glm53srv.request import GenerationRequest, SamplingParams

EOS_ID = 1


def make_limits(
    *,
    max_streams: int = 4,
    max_context_tokens: int = 64,
    max_chunk_tokens: int = 8,
    page_tokens: int = 4,
    num_pages: int | None = None,
    num_layers: int = 3,
    vocab_size: int = 40,
    eos_token_ids: tuple[int, ...] = (EOS_ID,),
) -> EngineLimits:
    """Make limits of a toy engine; num_pages None: enough for all streams at full length."""
    if num_pages is None:
        num_pages = max_streams * -(-max_context_tokens // page_tokens)
    return EngineLimits(
        max_streams=max_streams,
        max_context_tokens=max_context_tokens,
        max_chunk_tokens=max_chunk_tokens,
        page_tokens=page_tokens,
        num_pages=num_pages,
        num_layers=num_layers,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )


def make_request(
    request_id: str = "r",
    *,
    num_prompt: int = 3,
    prompt_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    sampling: SamplingParams | None = None,
) -> GenerationRequest:
    """Make a greedy request; without prompt_ids the prompt counts up from 2."""
    if prompt_ids is None:
        prompt_ids = [2 + position % 30 for position in range(num_prompt)]
    sampling = SamplingParams(temperature=0.0, seed=0) if sampling is None else sampling
    return GenerationRequest(request_id, tuple(prompt_ids), sampling, max_tokens)


def make_start(
    sampling: SamplingParams | None = None,
    *,
    seed: int = 0,
    prompt_ids: Sequence[int] = (2, 3),
    output_ids: Sequence[int] = (),
    request_id: str = "r",
) -> SequenceStart:
    """Make what an engine is told of a sequence."""
    sampling = SamplingParams() if sampling is None else sampling
    return SequenceStart(request_id, sampling, seed, tuple(prompt_ids), tuple(output_ids))
