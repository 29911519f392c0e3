"""Hide facts in long texts and ask for them: does the model still see what stood far back?

    python3 -m bench.needle --url http://127.0.0.1:30000 --tokens 2000 16000 --out needle.json

depths   a fact at each --depths of a text of each --tokens, asked for at the end
reused   two facts in one text: the second question comes after the same text, so that a prefix cache answers
         from kept state; both answers must be right
after    the same question in a chat without the text: the answer must not know the fact, or state has leaked

Texts and facts are drawn anew for each run. The words can be the model's own: --fact, --question, --values,
or whole turns of a chat with --dialogue, for a model that reads nothing else.

Exit code 0: share found is good and nothing leaked; 1: not; 2: could not be measured.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import measure
from bench.client import Client
from bench.errors import BadInput, BenchError
from bench.generation import Timed, chat
from bench.needle_texts import Haystack, Hidden, Message, Wording, read_dialogue
from bench.report import (
    Check,
    Progress,
    client_of,
    client_parser,
    close_report,
    open_report,
    run_command,
    table,
)

TOOL = "needle"
SLACK = 1.15
"""Texts come out a little longer than wanted, and the question comes on top."""

FACT = "Note well: the code of the {key} is {value}."
QUESTION = "What is the code of the {key}? Answer with the code alone."


@dataclass(frozen=True, slots=True)
class Answer:
    """One question asked. kind: depth, reused or after. is_good: found, or for `after` not known."""

    kind: str
    wanted_tokens: int
    prompt_tokens: int
    cached_tokens: int
    depth: float
    wanted: str
    said: str
    first_token_s: float
    is_good: bool


class Asker:
    """Asks one server. chars_per_token is learnt from its counts, so that texts get the wanted length."""

    def __init__(
        self, client: Client, haystack: Haystack, fields: dict[str, Any], max_tokens: int, seed: int
    ) -> None:
        self._client = client
        self._haystack = haystack
        self._fields = fields
        self._max_tokens = max_tokens
        self._rng = random.Random(seed)
        self._guesses: dict[str, str] = {}
        self.chars_per_token = 4.0

    def learn_guesses(self) -> None:
        """Ask for facts that were never told: what is said then is hidden nowhere, since finding it would
        prove nothing, and hitting it later would look like a leak."""
        for key in self._haystack.guessable:
            self._guesses[key] = self._ask([], key).text

    def depths(self, num_tokens: int, depths: Sequence[float]) -> list[Answer]:
        """Hide one fact at each depth of its own text."""
        answers = []
        for depth in depths:
            ((key, value),) = self._haystack.draw(self._rng, 1, self._guesses)
            text = self._text(num_tokens, [(depth, key, value)])
            answers.append(self._asked("depth", num_tokens, depth, text, key, value))
        return answers

    def reused(self, num_tokens: int) -> list[Answer]:
        """Hide two facts in one text and ask for them one after the other; then without the text."""
        first, second = self._haystack.draw(self._rng, 2, self._guesses)
        text = self._text(num_tokens, [(0.25, *first), (0.6, *second)])
        answers = [self._asked("reused", num_tokens, 0.25, text, *first)]
        answers.append(self._asked("reused", num_tokens, 0.6, text, *second))
        key, value = second
        timed = self._ask([], key)
        answers.append(_answer("after", num_tokens, 0.6, timed, value, is_good=not _has(timed.text, value)))
        return answers

    def _asked(
        self, kind: str, num_tokens: int, depth: float, text: Sequence[Message], key: str, value: str
    ) -> Answer:
        timed = self._ask(text, key)
        if timed.prompt_tokens:
            num_chars = sum(len(message["content"]) for message in text)
            self.chars_per_token = num_chars / timed.prompt_tokens
        return _answer(kind, num_tokens, depth, timed, value, is_good=_has(timed.text, value))

    def _ask(self, text: Sequence[Message], key: str) -> Timed:
        messages = self._haystack.ask(text, key)
        return chat(self._client, {**self._fields, "messages": messages, "temperature": 0}, self._max_tokens)

    def _text(self, num_tokens: int, facts: Sequence[Hidden]) -> list[Message]:
        return self._haystack.write(self._rng, round(num_tokens * self.chars_per_token), facts)


def _answer(kind: str, num_tokens: int, depth: float, timed: Timed, wanted: str, *, is_good: bool) -> Answer:
    return Answer(
        kind=kind,
        wanted_tokens=num_tokens,
        prompt_tokens=timed.prompt_tokens,
        cached_tokens=timed.cached_tokens,
        depth=depth,
        wanted=wanted,
        said=timed.text[-200:],
        first_token_s=round(timed.first_token_s, 3),
        is_good=is_good,
    )


def _has(said: str, value: str) -> bool:
    """Tell whether the value was said; separators that a model puts into numbers do not matter."""
    plain = said.casefold().replace(",", "").replace("-", "")
    return value.casefold() in said.casefold() or value.casefold() in plain


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    haystack = _haystack(options)
    client = client_of(options)
    report = open_report(TOOL, argv, client, out=options.out, secret=options.api_key)
    progress = Progress(None if options.quiet else sys.stderr)
    fields: dict[str, Any] = {} if options.thinking else {"chat_template_kwargs": {"enable_thinking": False}}
    seed = secrets.randbits(64) if options.seed is None else options.seed
    asker = Asker(client, haystack, fields, options.max_tokens, seed)
    room = measure.context_tokens(report.server_before or {}) - options.max_tokens
    lengths = [num_tokens for num_tokens in options.tokens if num_tokens * SLACK <= room]
    left_out = sorted(set(options.tokens) - set(lengths))
    if left_out:
        report.notes.append(f"texts of {left_out} tokens do not fit into the context: left out")
    if lengths:
        asker.learn_guesses()
        asker.depths(min(500, *lengths), [0.5])  # learns the length of a token
    answers: list[Answer] = []
    for num_tokens in lengths:
        for answer in [*asker.depths(num_tokens, options.depths), *asker.reused(num_tokens)]:
            answers.append(answer)
            verdict = (
                "good" if answer.is_good else f"WRONG, wanted {answer.wanted}, got {answer.said[-60:]!r}"
            )
            progress(f"{answer.kind} {answer.prompt_tokens} tokens, depth {answer.depth:.2f}: {verdict}")
    if not answers:
        raise BenchError(
            f"nothing was asked: no text fits into {room} tokens beside its answer; give --tokens"
        )
    report.result = {"answers": [asdict(answer) for answer in answers]}
    hidden = [answer for answer in answers if answer.kind != "after"]
    found = sum(answer.is_good for answer in hidden) / len(hidden)
    leaks = sum(not answer.is_good for answer in answers if answer.kind == "after")
    report.checks += [
        Check("share of facts found", found, options.min_found, at_least=True),
        Check("answers that knew a fact of an earlier request", leaks, 0),
    ]
    seconds = [answer for answer in answers if answer.kind == "reused"][1::2]
    if all(answer.cached_tokens == 0 for answer in seconds):
        report.notes.append("no second question was answered from a prefix cache: the server has none")
    return close_report(report, options.out, _table(answers), client)


def _haystack(options: argparse.Namespace) -> Haystack:
    """Give what to hide facts in. Raises BadInput."""
    if options.dialogue is not None:
        return read_dialogue(options.dialogue)
    if "{value}" not in options.fact:
        raise BadInput("--fact must have {value} where the value goes")
    if options.values is not None and len(set(options.values)) < 2:
        raise BadInput("--values must be two or more different words")
    return Wording(options.fact, options.question, tuple(options.values or ()))


def _table(answers: Sequence[Answer]) -> str:
    rows = [
        [
            answer.kind,
            answer.prompt_tokens,
            answer.cached_tokens,
            f"{answer.depth:.2f}",
            f"{answer.first_token_s:.2f}",
            "good" if answer.is_good else "WRONG",
        ]
        for answer in answers
    ]
    return table(["question", "tokens", "cached", "depth", "first token s", "answer"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = client_parser(TOOL, __doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[2000, 16000], help="lengths of the texts (2000 16000)")
    add("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], help="0 begin, 1 end")
    add("--fact", default=FACT, help="the sentence to hide, with {value} and {key} (%(default)s)")
    add("--question", default=QUESTION, help="how to ask for it, with {key} (%(default)s)")
    add("--values", nargs="+", help="values to choose from (default: codes of six digits)")
    add(
        "--dialogue", type=Path, help="a chat's words in place of a text's: a file, see bench/needle_texts.py"
    )
    add("--thinking", action="store_true", help="let the model think first (default: thinking off)")
    add("--max-tokens", type=int, default=200, help="longest answer (%(default)s)")
    add("--seed", type=int, help="of the draws; a server may know the texts of a seed (default: new ones)")
    add("--min-found", type=float, default=1.0, help="smallest good share (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
