"""What a request is, between the HTTP shell and the scheduler: frozen values, no behaviour but validation."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from glm53srv.errors import InvalidRequest

MAX_LOGPROBS = 20
"""Largest top_logprobs (OpenAI API reference, chat completions)."""


class FinishReason(enum.Enum):
    """Why a sequence ended, as the scheduler sees it.

    `tool_calls` is a matter of the output parser, not of it.
    """

    STOP = "stop"  # a stop id was sampled, or the service closed the stream at a stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client went away, or the server is draining
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are neutral; the checkpoint's own defaults are applied by
    the API.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and penalties 0 / 1 switch the filter off.
    presence_penalty and frequency_penalty count output tokens; repetition_penalty counts prompt and output
    tokens. seed None draws a fresh one. logit_bias: pairs (token id, bias added to the logit). num_logprobs:
    None gives no log probabilities, n >= 0 the sampled token's and the n largest. stop_token_ids are added
    to the checkpoint's own end ids; ignore_eos drops the checkpoint's, never the request's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every range. Raises InvalidRequest with the OpenAI name of the field in `param`."""
        _require(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or a positive whole number")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        _require(
            0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "must be above 0 and at most 100"
        )
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must be a 64-bit whole number")
        _require(self.min_tokens >= 0, "min_tokens", "must be 0 or more")
        _require(
            self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS,
            "top_logprobs",
            f"must be between 0 and {MAX_LOGPROBS}",
        )
        _require(
            all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
            "logit_bias",
            "must have values between -100 and 100",
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    prompt_ids: at least one token id. max_tokens: None means what is left of the context.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _require(len(self.prompt_ids) > 0, "messages", "must hold at least one token")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be 1 or more")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of one sampled position, before temperature and filters, after bias and
    penalties.

    top: the largest ones, best first, as (token id, log probability); at most SamplingParams.num_logprobs of
    them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step's news of one sequence.

    token_id: the sampled token, or None in an event that only ends the sequence. is_stop_token: the token is
    a stop id and belongs to no text. finish: set in the last event of a sequence, and only there. error:
    with FinishReason.ERROR, one line.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    is_stop_token: bool = False
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; completion_tokens includes reasoning and the stop id."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


def _require(condition: bool, param: str, text: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {text}", param=param)
