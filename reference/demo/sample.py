"""What a training sample is, and the draw that keeps held-out material out of training."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any, TypeVar

HELD_OUT_PARTS = 12
"""One combination in so many is never trained on."""

T = TypeVar("T")
JsonObject = dict[str, Any]
"""JSON at the edge: tool schemas and arguments."""


def is_held_out(key: str) -> bool:
    """Say whether a combination belongs to the evaluation; depends on the key's text alone (blake2b)."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % HELD_OUT_PARTS == 0


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call, arguments typed as in the tool's schema."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: a user text, then what the assistant thinks and says.

    calls: made instead of an answer; results: one text per call; then `answer` is given after the results,
    with `after` as the reasoning there. Without calls, `after` is unused. key: names the combination.
    """

    user: str
    thought: str
    answer: str
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()
    after: str = ""
    category: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A dialogue as the chat template takes it.

    thinking: "kept" (every turn shows its reasoning), "cleared" (only turns after the last user message) or
    "off" (every turn closes its reasoning at once).
    """

    turns: tuple[Turn, ...]
    system: str | None = None
    tools: tuple[JsonObject, ...] = ()
    effort: str = "max"
    thinking: str = "kept"


@dataclass(slots=True)
class Draw:
    """A seeded source of choices; `held_out` says which side of the split combinations must fall on.

    One owner, one thread. check(key) is called by generators for every combination they make.
    """

    rng: random.Random
    held_out: bool = False
    _tries: int = field(default=0)

    def pick(self, options: tuple[T, ...] | list[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """Draw a whole number in [low, high]."""
        return low + int(self.rng.random() * (high - low + 1))

    def accepts(self, key: str) -> bool:
        """Say whether a combination may be used on this side of the split."""
        return is_held_out(key) == self.held_out
