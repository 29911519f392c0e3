"""Prompts that clients write themselves: text or token ids, one or a list of them."""

from __future__ import annotations

from collections.abc import Sequence

from glm53srv.api.served import ServedModel
from glm53srv.api.tokenizer import TooManyIds
from glm53srv.api.wire import Fields, invalid
from glm53srv.errors import ContextLengthExceeded

Prompt = tuple[str, str | tuple[int, ...]]
"""The path of its field, and text or token ids."""


def parse_prompts(fields: Fields, name: str) -> tuple[tuple[Prompt, ...], bool]:
    """Read string, [string], [int] or [[int]]; gives the prompts and whether it was a list of them.

    Raises InvalidRequest naming the field.
    """
    path, value = fields.path_of(name), fields.raw(name)
    if isinstance(value, str):
        return ((path, value),), False
    if not isinstance(value, list) or not value:
        raise invalid(path, "must be a string, a list of strings, token ids or a list of lists of token ids")
    if _is_ids(value):
        return ((path, tuple(value)),), False
    prompts: list[Prompt] = []
    for at, entry in enumerate(value):
        if isinstance(entry, str):
            prompts.append((f"{path}[{at}]", entry))
        elif isinstance(entry, list) and entry and _is_ids(entry):
            prompts.append((f"{path}[{at}]", tuple(entry)))
        else:
            raise invalid(f"{path}[{at}]", "must be a string or a non-empty list of token ids")
    if len({type(prompt) for _, prompt in prompts}) > 1:
        raise invalid(path, "must hold strings only, or lists of token ids only")
    return tuple(prompts), True


def encode_prompts(
    prompts: Sequence[Prompt], model: ServedModel, max_tokens: int | None
) -> list[tuple[int, ...]]:
    """Give the token ids of every prompt; in text the spelling of a control token stands for the token.

    Raises InvalidRequest or ContextLengthExceeded, here and not on the event loop.
    """
    return [_encode(path, prompt, model, max_tokens) for path, prompt in prompts]


def _encode(
    path: str, prompt: str | tuple[int, ...], model: ServedModel, max_tokens: int | None
) -> tuple[int, ...]:
    tokenizer, most = model.tokenizer, model.context_tokens - 1
    num_ids = len(prompt)
    if isinstance(prompt, str):
        try:
            ids = tuple(tokenizer.encode_with_controls(prompt, max_ids=most))
        except TooManyIds as error:
            num_ids = error.num_ids
        else:
            if not ids:
                raise invalid(path, "must hold at least one token")
            return ids
    elif num_ids <= most:
        if min(prompt) < 0 or max(prompt) >= tokenizer.num_ids:
            raise invalid(path, f"has a token id that is not between 0 and {tokenizer.num_ids - 1}")
        return prompt
    raise ContextLengthExceeded(
        limit_tokens=model.context_tokens,
        prompt_tokens=num_ids,
        completion_tokens=1 if max_tokens is None else max(max_tokens, 1),
        param=path,
    )


def _is_ids(value: Sequence[object]) -> bool:
    return {*map(type, value)} == {int}  # a bool is an int to isinstance
