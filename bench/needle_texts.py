"""What needles are hidden in: one long text, or a long chat in the model's own words. No network."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.errors import BadInput

Message = dict[str, str]
Hidden = tuple[float, str, str]
"""Depth (0 the beginning, 1 the end), key and value of a fact."""

KEYS = ("harbour office", "old observatory", "north gate", "clock tower", "seed library", "river lock")

SUBJECTS = (
    "The gardener",
    "A neighbour",
    "The ferryman",
    "My aunt",
    "The schoolteacher",
    "A travelling cook",
)
DEEDS = ("mended", "painted", "carried", "looked for", "sold", "measured", "described", "borrowed")
THINGS = ("a wooden ladder", "the blue boat", "three baskets", "an old map", "the kitchen clock", "a letter")
ENDINGS = ("before breakfast", "in the rain", "without a word", "on market day", "for the second time")


class Haystack(Protocol):
    """Facts to hide, and what to hide them in."""

    @property
    def guessable(self) -> Sequence[str]:
        """Keys whose value a model may hit without having read it."""

    def draw(self, rng: random.Random, num: int, guesses: Mapping[str, str]) -> list[tuple[str, str]]:
        """Draw (key, value) pairs, keys and values all different. guesses: what the model says unread."""

    def write(self, rng: random.Random, num_chars: int, facts: Sequence[Hidden]) -> list[Message]:
        """Write about num_chars with each fact at its depth."""

    def ask(self, history: Sequence[Message], key: str) -> list[Message]:
        """Give the messages of a request that asks for a fact behind what was written, or behind nothing."""


@dataclass(frozen=True, slots=True)
class Wording:
    """One text of drawn sentences. values: to choose from; empty: codes of six digits."""

    fact: str
    question: str
    values: tuple[str, ...]

    @property
    def guessable(self) -> Sequence[str]:
        return ()

    def draw(self, rng: random.Random, num: int, guesses: Mapping[str, str]) -> list[tuple[str, str]]:
        keys = rng.sample(KEYS, num)
        if self.values:
            return list(zip(keys, rng.sample(self.values, num), strict=True))
        return [(key, str(rng.randrange(100_000, 1_000_000))) for key in keys]

    def write(self, rng: random.Random, num_chars: int, facts: Sequence[Hidden]) -> list[Message]:
        sentences: list[str] = []
        length = 0
        while length < num_chars:
            parts = [rng.choice(words) for words in (SUBJECTS, DEEDS, THINGS, ENDINGS)]
            sentences.append(f"{' '.join(parts)}.")
            length += len(sentences[-1]) + 1
        num_plain = len(sentences)
        for depth, key, value in sorted(facts, reverse=True):
            sentences.insert(round(depth * num_plain), self.fact.format(key=key, value=value))
        return [{"role": "user", "content": " ".join(sentences)}]

    def ask(self, history: Sequence[Message], key: str) -> list[Message]:
        question = self.question.format(key=key)
        text = "".join(f"{message['content']}\n\n" for message in history)
        return [{"role": "user", "content": f"{text}{question}"}]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A chat of many turns, for a model that reads nothing else: facts are told in turns of their own.

    tell, reply, question: with {key} and, but for the question, {value}. values: by key. turns: (user,
    assistant), drawn to fill the chat.
    """

    tell: str
    reply: str
    question: str
    values: Mapping[str, tuple[str, ...]]
    turns: tuple[tuple[str, str], ...]

    @property
    def guessable(self) -> Sequence[str]:
        return tuple(self.values)

    def draw(self, rng: random.Random, num: int, guesses: Mapping[str, str]) -> list[tuple[str, str]]:
        drawn: list[tuple[str, str]] = []
        for key in rng.sample(sorted(self.values), num):
            guess = guesses.get(key, "").casefold()
            taken = {value for _, value in drawn}
            free = [
                value for value in self.values[key] if value.casefold() not in guess and value not in taken
            ]
            drawn.append((key, rng.choice(free)))
        return drawn

    def write(self, rng: random.Random, num_chars: int, facts: Sequence[Hidden]) -> list[Message]:
        told: list[tuple[str, str]] = []
        length = 0
        while length < num_chars:
            told.append(rng.choice(self.turns))
            length += sum(map(len, told[-1]))
        num_plain = len(told)
        for depth, key, value in sorted(facts, reverse=True):
            fact = tuple(text.format(key=key, value=value) for text in (self.tell, self.reply))
            told.insert(round(depth * num_plain), (fact[0], fact[1]))
        return [
            {"role": role, "content": text}
            for turn in told
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]

    def ask(self, history: Sequence[Message], key: str) -> list[Message]:
        return [*history, {"role": "user", "content": self.question.format(key=key)}]


def read_dialogue(path: Path) -> Dialogue:
    """Read a dialogue file: JSON with the fields of Dialogue. Raises BadInput, one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        dialogue = Dialogue(
            tell=str(content["tell"]),
            reply=str(content["reply"]),
            question=str(content["question"]),
            values={str(key): tuple(map(str, values)) for key, values in content["values"].items()},
            turns=tuple((str(user), str(assistant)) for user, assistant in content["turns"]),
        )
    except OSError as error:
        raise BadInput(f"--dialogue {path}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"--dialogue {path}: not a dialogue file: {error!r}") from error
    if not dialogue.turns or len(dialogue.values) < 2 or any(len(v) < 3 for v in dialogue.values.values()):
        raise BadInput(f"--dialogue {path}: needs turns, and two or more keys with three or more values each")
    return dialogue
