"""Whether a request can be served at all, whatever else runs."""

from __future__ import annotations

from glm53srv.engine.base import EngineLimits
from glm53srv.errors import ContextLengthExceeded, InvalidRequest
from glm53srv.request import GenerationRequest


def context_tokens(limits: EngineLimits) -> int:
    """Give the longest sequence that one stream can reach: the model's context, or all pages."""
    return min(limits.max_context_tokens, limits.num_pages * limits.page_tokens)


def check_request(request: GenerationRequest, limits: EngineLimits) -> None:
    """Raise InvalidRequest or ContextLengthExceeded for a request that no free engine could take."""
    _check_ids("messages", request.id_range, limits.vocab_size)
    _check_ids(
        "logit_bias", tuple(token_id for token_id, _ in request.sampling.logit_bias), limits.vocab_size
    )
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    _check_ids("token_ids_logprob", request.sampling.logprob_token_ids, limits.vocab_size)
    if request.prompt_logprobs is not None:
        _check_ids("token_ids_logprob", request.prompt_logprobs.token_ids, limits.vocab_size)
    if len(request.prompt_ids) >= context_tokens(limits):
        raise ContextLengthExceeded(
            limit_tokens=context_tokens(limits),
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=1 if request.max_tokens is None else max(request.max_tokens, 1),
            param="messages",
        )


def _check_ids(param: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise InvalidRequest(
            f"{param} has a token id that is not between 0 and {vocab_size - 1}", param=param
        )
