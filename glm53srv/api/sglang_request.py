"""The body of SGLang's POST /generate, checked whole before any response starts.

Exactly one of `text` and `input_ids`, one prompt or a list of them. What concerns one prompt may be a list
with an entry for each. null stands for the default, which is SGLang's, not the checkpoint's: temperature 1
and no filter. One departure: without max_new_tokens what is left of the context is the limit, not 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm53srv.api.constraints import OutputFormat, parse_output_format
from glm53srv.api.raw_prompts import Prompt, parse_prompts
from glm53srv.api.schema import MAX_CHOICES, parse_ids, parse_sampling, parse_stop, ranged
from glm53srv.api.wire import Fields, invalid
from glm53srv.request import MAX_LOGPROBS, SamplingParams

MAX_BATCH = 64
"""Sequences of one request, prompts times n: as many as the queue holds by default."""

MAX_NAMED_IDS = 1000
"""Longest token_ids_logprob."""

REFUSED_FIELDS: Mapping[str, str] = {
    "input_embeds": "send text or input_ids",
    "image_data": "the server is text only",
    "video_data": "the server is text only",
    "audio_data": "the server is text only",
    "lora_path": "there are no adapters",
    "session_params": "there are no sessions",
    "custom_logit_processor": "requests run no code",
    "return_hidden_states": "hidden states are not given out",
}
"""Fields that would change the answer and cannot be honoured. null, false and empty are taken as absent."""

REFUSED_SAMPLING: Mapping[str, str] = {
    "stop_regex": "send stop",
    "custom_params": "requests run no code",
}

IGNORED_FIELDS: Mapping[str, str] = {
    "priority": "requests run in the order in which they come",
    "stream_interval": "there is one event per step",
    "spaces_between_special_tokens": "tokens are joined byte by byte",
    "log_metrics": "metrics hold no text",
}
"""Known fields that change nothing, with the reason."""

SAMPLING_NAMES: Mapping[str, str] = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What one prompt of a batch is asked with.

    max_tokens: None means what is left of the context. logprob_start: first prompt position to judge, None
    for none. sampling: log probabilities of outputs included.
    """

    prompt: Prompt
    request_id: str
    sampling: SamplingParams
    max_tokens: int | None
    num_choices: int
    stop: tuple[str, ...]
    keeps_stop: bool
    skip_special_tokens: bool
    logprob_start: int | None
    output_format: OutputFormat | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.sampling.num_logprobs is not None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One body. is_list: the answer is a list, also of one. names_tokens: log probabilities carry texts."""

    prompts: tuple[PromptOptions, ...]
    is_list: bool
    is_stream: bool
    names_tokens: bool


def parse_generate_request(body: Mapping[str, Any], request_id: str) -> GenerateRequest:
    """Check a decoded body. request_id: for prompts without a rid. Raises InvalidRequest naming the field."""
    fields = Fields(dict(body))
    refuse(fields, REFUSED_FIELDS)
    if fields.has("text") == fields.has("input_ids"):
        raise fields.error("text", "or input_ids must be given, one of the two")
    name = "text" if fields.has("text") else "input_ids"
    prompts, is_batch = parse_prompts(fields, name)
    if any(isinstance(prompt, str) != (name == "text") for _, prompt in prompts):
        raise fields.error(name, "must hold text" if name == "text" else "must hold token ids")
    per_prompt = _PerPrompt(fields, len(prompts), is_batch)
    options = tuple(_options(per_prompt, at, prompt, request_id) for at, prompt in enumerate(prompts))
    num_choices = options[0].num_choices
    if any(option.num_choices != num_choices for option in options):
        raise fields.error("sampling_params", "must have the same n for all prompts")
    if len(prompts) * num_choices > MAX_BATCH:
        raise fields.error(name, f"asks for more than {MAX_BATCH} outputs in one request; send fewer")
    return GenerateRequest(
        options,
        is_list=is_batch or num_choices > 1,
        is_stream=fields.boolean("stream", False),
        names_tokens=fields.boolean("return_text_in_logprobs", False),
    )


def refuse(fields: Fields, table: Mapping[str, str]) -> None:
    """Raise InvalidRequest for the first field of a table that is there."""
    for name, remedy in table.items():
        if fields.raw(name) not in (None, False, "", [], {}):
            raise fields.error(name, f"is not supported: {remedy}")


class _PerPrompt:
    """Fields that are one value for all prompts or a list with one for each."""

    def __init__(self, fields: Fields, num_prompts: int, is_batch: bool) -> None:
        self.fields = fields
        self.num_prompts = num_prompts
        self.is_batch = is_batch

    def at(self, name: str, prompt: int, *, is_list: bool = False) -> Fields:
        """Give a value for one prompt as the member `name` of an object of its own, to be read by type.

        is_list: the value for one prompt is itself a list.
        """
        value = self.fields.raw(name)
        is_split = isinstance(value, list) and self.is_batch
        if is_split and is_list:
            is_split = any(entry is None or isinstance(entry, list) for entry in value)
        if is_split:
            if len(value) != self.num_prompts:
                raise self.fields.error(name, f"must have one entry for each of {self.num_prompts} prompts")
            value = value[prompt]
        return Fields({name: value})


def _options(per_prompt: _PerPrompt, at: int, prompt: Prompt, request_id: str) -> PromptOptions:
    fields = per_prompt.at("sampling_params", at).object("sampling_params") or Fields({}, "sampling_params")
    refuse(fields, REFUSED_SAMPLING)
    wants_logprobs = per_prompt.at("return_logprob", at).boolean("return_logprob", False)
    num_top = ranged(per_prompt.at("top_logprobs_num", at), "top_logprobs_num", 0, MAX_LOGPROBS) or 0
    start = ranged(per_prompt.at("logprob_start_len", at), "logprob_start_len", -1, None)
    start = -1 if start is None else start
    num_prompt = len(prompt[1]) if not isinstance(prompt[1], str) else None
    if num_prompt is not None and start >= num_prompt:
        raise invalid("logprob_start_len", f"must be below the prompt's {num_prompt} tokens")
    named = parse_ids(per_prompt.at("token_ids_logprob", at, is_list=True), "token_ids_logprob")
    if len(named) > MAX_NAMED_IDS:
        raise invalid("token_ids_logprob", f"must have at most {MAX_NAMED_IDS} ids")
    sampling = parse_sampling(
        fields, SamplingParams(), num_top if wants_logprobs else None, SAMPLING_NAMES, named
    )
    return PromptOptions(
        prompt=prompt,
        request_id=_request_id(per_prompt, at, request_id),
        sampling=sampling,
        max_tokens=ranged(fields, "max_new_tokens", 0, None),
        num_choices=ranged(fields, "n", 1, MAX_CHOICES) or 1,
        stop=parse_stop(fields),
        keeps_stop=fields.boolean("no_stop_trim", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        logprob_start=start if wants_logprobs and start >= 0 else None,
        output_format=parse_output_format(fields),
    )


def _request_id(per_prompt: _PerPrompt, at: int, request_id: str) -> str:
    """Give a prompt's rid; one rid for several prompts is the beginning of theirs."""
    rid = per_prompt.at("rid", at).string("rid")
    if isinstance(per_prompt.fields.raw("rid"), list) and rid is not None:
        return rid
    rid = request_id if rid is None else rid
    return rid if at == 0 and not per_prompt.is_batch else f"{rid}-{at}"


def check_start(start: int | None, prompt_ids: Sequence[int]) -> None:
    """Raise InvalidRequest unless the prompt, now that it is encoded, reaches to logprob_start_len."""
    if start is not None and start >= len(prompt_ids):
        raise invalid("logprob_start_len", f"must be below the prompt's {len(prompt_ids)} tokens")
