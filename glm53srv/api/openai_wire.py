"""What the OpenAI protocols share: errors, usage, times, the model, and the framing of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from glm53srv.api.served import OWNER, ServedModel
from glm53srv.api.service import Timings
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.errors import ModelNotFound, RequestError
from glm53srv.request import PromptNews, Usage

DONE = b"data: [DONE]\n\n"
LEAD, TAIL = b"data: ", b"\n\n"


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise ModelNotFound for a name that is not served; no name means the one model there is."""
    if name is not None and name != model.name:
        raise ModelNotFound(
            f"The model {name!r} does not exist; this server serves {model.name!r}", param="model"
        )


def split_stops(stops: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Special tokens never become text, so a stop string that spells one is a stop id."""
    texts, ids = [], []
    for stop in stops:
        token_id = tokenizer.control_id(stop)
        if token_id is not None and tokenizer.is_special(token_id):
            ids.append(token_id)
        texts.append(stop)  # the model may also spell it out of ordinary tokens
    return tuple(texts), tuple(ids)


def error_body(error: RequestError) -> dict[str, Any]:
    """Give the body of an error answer."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_event(error: RequestError) -> bytes:
    """Give the last events of a stream that cannot go on."""
    return LEAD + orjson.dumps(error_body(error)) + TAIL + DONE


def usage_body(usage: Usage) -> dict[str, Any]:
    """Spell token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_body(usage: Usage, timings: Timings) -> dict[str, Any]:
    """Spell how long a choice took, under llama.cpp's names; its milliseconds begin where waiting ends."""
    num_new = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": num_new,
        "prompt_ms": round(timings.prefill_s * 1000, 3),
        "prompt_per_second": _rate(num_new, timings.prefill_s),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(timings.decode_s * 1000, 3),
        "predicted_per_second": _rate(max(usage.completion_tokens - 1, 0), timings.decode_s),
    }


def slowest(first: Timings | None, second: Timings | None) -> Timings | None:
    """Join the times of choices that ran beside each other."""
    if first is None or second is None:
        return first or second
    return Timings(
        queue_s=max(first.queue_s, second.queue_s),
        prefill_s=max(first.prefill_s, second.prefill_s),
        decode_s=max(first.decode_s, second.decode_s),
        total_s=max(first.total_s, second.total_s),
        num_preemptions=first.num_preemptions + second.num_preemptions,
    )


def _rate(count: int, seconds: float) -> float:
    """Tokens per second; the first token falls to the prompt's time. 0 where nothing was measured."""
    return round(count / seconds, 3) if seconds > 0 else 0.0


def progress_body(usage: Usage, news: PromptNews) -> dict[str, Any]:
    """Spell how far the prompt is, as llama.cpp does."""
    return {
        "total": usage.prompt_tokens,
        "cache": usage.cached_tokens,
        "processed": news.num_computed,
        "time_ms": round(news.elapsed_s * 1000),
    }


def model_body(model: ServedModel) -> dict[str, Any]:
    """Describe the model; the context is the one that can be served."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_tokens,
    }
