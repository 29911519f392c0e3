"""What a request is, between the HTTP shell and the scheduler: frozen values, no behaviour but validation."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from glm53srv.errors import InvalidRequest

MAX_LOGPROBS = 20
"""Largest top_logprobs (OpenAI API reference, chat completions)."""

MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: one near zero would make them infinite, which is taken for a broken model."""


class FinishReason(enum.Enum):
    """Why a sequence ended, as the scheduler sees it.

    `tool_calls` is a matter of the output parser, not of it.
    """

    STOP = "stop"  # a stop id was sampled, or the service closed the stream at a stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client went away, or the server is draining
    CANCELLED = "cancelled"  # another request asked for its end
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language that the output must be a word of; the end ids come where a word may end, and only there.

    kind: how `text` is written: a JSON schema, a regular expression, a Lark grammar, or llguidance's own JSON
    (several grammars that name each other). Grammars may name tokens by id, `<[154843]>`; text never matches
    a control token. Checked before it gets here: engine/grammar.py.
    """

    kind: Literal["json_schema", "regex", "lark", "llguidance"]
    text: str


@dataclass(frozen=True, slots=True)
class OpenReasoning:
    """The prompt ends inside reasoning, and something depends on where the output leaves it.

    end_id: the token that ends reasoning. exit_ids: tokens that end it as well (a call begins). A constraint
    binds what follows the end, and bans exit_ids and end ids until then. budget_tokens: after so many tokens
    of reasoning, end_id is the next token; None: no limit.
    """

    end_id: int
    exit_ids: tuple[int, ...] = ()
    budget_tokens: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.budget_tokens is None or self.budget_tokens >= 0, "thinking_budget", "must be 0 or more"
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are neutral; the checkpoint's own defaults are applied by
    the API.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and penalties 0 / 1 switch the filter off.
    presence_penalty and frequency_penalty count output tokens; repetition_penalty counts prompt and output
    tokens. seed None draws a fresh one. logit_bias: pairs (token id, bias added to the logit). num_logprobs:
    None gives no log probabilities, n >= 0 the sampled token's and the n largest. stop_token_ids are added
    to the checkpoint's own end ids; ignore_eos drops the checkpoint's, never the request's.
    logprob_token_ids: ids whose log probabilities are given too, where num_logprobs is not None. constraint,
    reasoning: see their types.
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
    logprob_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    reasoning: OpenReasoning | None = None

    def __post_init__(self) -> None:
        """Check every range. Raises InvalidRequest with the OpenAI name of the field in `param`."""
        _require(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or a positive whole number")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        _require(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= 100.0,
            "repetition_penalty",
            f"must be between {MIN_REPETITION_PENALTY} and 100",
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
class PromptLogprobs:
    """Asks for the log probabilities of the prompt tokens at positions [start_position, end of the prompt).

    The one at position i is that of prompt token i given tokens 0 to i - 1, from the model's own logits, so
    position 0 has none. num_top: how many of the largest come with each. token_ids: further ids.
    """

    start_position: int = 1
    num_top: int = 0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.start_position >= 1, "logprob_start_len", "must be 1 or more inside the server")
        _require(0 <= self.num_top <= MAX_LOGPROBS, "logprobs", f"must be between 0 and {MAX_LOGPROBS}")

    def positions_after(self, chunk_begin: int, chunk_end: int, num_prompt: int) -> range:
        """Give the wanted positions whose log probabilities a chunk of tokens [begin, end) yields.

        The logits of position i judge token i + 1, so they are those in [begin + 1, end + 1).
        """
        return range(max(chunk_begin + 1, self.start_position), min(chunk_end + 1, num_prompt))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    prompt_ids: at least one token id. max_tokens: None means what is left of the context; 0 computes the
    prompt only. prompt_logprobs: what to tell of the prompt's tokens, or None. reports_prompt: give an event
    after each chunk of the prompt, also without log probabilities. id_range: least and largest prompt id,
    found here, where the request is made, so that submitting a long prompt costs the event loop nothing.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    reports_prompt: bool = False
    id_range: tuple[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _require(len(self.prompt_ids) > 0, "messages", "must hold at least one token")
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "must be 0 or more")
        object.__setattr__(self, "id_range", (min(self.prompt_ids), max(self.prompt_ids)))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position: of a sampled token before temperature and filters, after
    bias and penalties; of a prompt token from the bare logits.

    top: the largest ones, best first, as (token id, log probability), at most as many as were asked for.
    others: those of the ids that were asked for by name, in that order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    others: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptNews:
    """What the end of a chunk tells about the prompt, to a request that asked.

    num_computed: prompt tokens computed so far; less than before when a preempted sequence begins again.
    elapsed_s: since the sequence first ran. logprobs: those of the next prompt tokens, each position once and
    in order over all events.
    """

    num_computed: int
    elapsed_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step's news of one sequence.

    token_id: the sampled token, or None in an event that only ends the sequence or only tells of its prompt.
    is_stop_token: the token is a stop id and belongs to no text. finish: set in the last event of a sequence,
    and only there. error: with FinishReason.ERROR, one line.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    is_stop_token: bool = False
    finish: FinishReason | None = None
    error: str | None = None
    prompt: PromptNews | None = None


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """When things happened to a sequence, in seconds of the step loop's clock; None: not yet.

    num_preemptions: how often it lost its place and was computed again.
    """

    submitted_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0


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
