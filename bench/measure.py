"""The measurements of a sweep, one function each, over any server that streams.

Prompts are random token ids, drawn fresh for every run, so that no cache can help; chats carry a number
drawn for the run for the same reason.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.client import Client
from bench.errors import BenchError
from bench.generation import Prompter, Timed, at_once, chat, choose_prompter, generate_text

FALLBACK_CONTEXT = 131072
MARGIN_TOKENS = 64
"""Left free in the context beyond a prompt."""

TASKS = (
    "how a lighthouse lens throws its beam so far",
    "why bread rises, and what goes wrong when it does not",
    "how a suspension bridge carries its load",
    "the life of a salmon from egg to river",
    "how a mechanical clock keeps time",
    "what makes a violin sound unlike a flute",
    "how cities got clean water",
    "why the moon shows always the same face",
    "how a sailing boat moves against the wind",
    "what happens in the soil of a garden in winter",
    "how money is printed so that it is hard to copy",
    "how glass is made, and why it is clear",
)
"""What the chats ask about; each wants a long answer, so that the decode is long."""

GLM_PROMPT = "[gMASK]<sop><|user|>{question}<|assistant|><think></think>"
"""The chat format of the published sweeps of this model: no system turn, thinking closed."""


@dataclass(slots=True)
class Bench:
    """A server under measurement, and what of it the prompts depend on. id_range: half open.

    nonce makes the chats of this run new to every cache. sent, received: tokens of all generations so far,
    to hold against the server's counters; cached: those of the prompts that the server had already.
    """

    client: Client
    prompter: Prompter
    prompter_name: str
    id_range: tuple[int, int]
    context_tokens: int
    template: str = "server"
    nonce: str = field(default_factory=lambda: secrets.token_hex(6))
    rng: random.Random = field(default_factory=lambda: random.Random(secrets.randbits(64)))
    sent: int = 0
    received: int = 0
    cached: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(
        cls, client: Client, pages: dict[str, Any], *, template: str, id_range: tuple[int, int] | None
    ) -> Bench:
        """Make it from what the server says (facts.server_facts). Raises BenchError if it takes no ids."""
        vocabulary = id_range or _id_range(client, pages)
        probe = list(range(vocabulary[0], min(vocabulary[0] + 4, vocabulary[1])))
        name, prompter = choose_prompter(client, probe)
        return cls(client, prompter, name, vocabulary, context_tokens(pages), template)

    def random_ids(self, num_tokens: int) -> list[int]:
        """Draw a fresh prompt."""
        return [self.rng.randrange(*self.id_range) for _ in range(num_tokens)]

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a prompt and a little output fit into the context."""
        return num_tokens + MARGIN_TOKENS <= self.context_tokens

    def prompt(self, ids: Sequence[int], max_tokens: int) -> Timed:
        """Prompt with ids."""
        return self._count(self.prompter(self.client, ids, max_tokens))

    def ask(self, number: int, max_tokens: int | None, *, ignore_eos: bool = False) -> Timed:
        """Ask chat question `number` of this run. ignore_eos: go on to max_tokens, past natural ends."""
        task = TASKS[number % len(TASKS)]
        question = f"Request {self.nonce}-{number}. Write a long, careful explanation of {task}."
        if self.template == "glm":
            text = GLM_PROMPT.format(question=question)
            return self._count(generate_text(self.client, text, max_tokens))
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        if ignore_eos:
            fields["ignore_eos"] = True
        return self._count(chat(self.client, fields, max_tokens))

    def _count(self, timed: Timed) -> Timed:
        with self._lock:
            self.sent += timed.prompt_tokens
            self.received += timed.completion_tokens
            self.cached += timed.cached_tokens
        return timed


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """C chats at once.

    aggregate: all completion tokens by the time from the first request to the last token. after_first: by
    the time from the first token of any to the last token of all, as the published sweeps count.
    per_stream: each stream's tokens after its first, by their time. server_per_stream: the same as the
    server timed it, where it says so.
    """

    aggregate: float
    after_first: float
    per_stream: tuple[float, ...]
    server_per_stream: tuple[float, ...]
    completion_tokens: tuple[int, ...]
    finishes: tuple[str, ...]
    first_token_s: tuple[float, ...]


def prefill_run(bench: Bench, num_tokens: int) -> float:
    """Give the seconds to the first token of a fresh prompt."""
    timed = bench.prompt(bench.random_ids(num_tokens), 1)
    if timed.prompt_tokens and timed.prompt_tokens - timed.cached_tokens < num_tokens * 0.98:
        raise BenchError(
            f"the server computed {timed.prompt_tokens - timed.cached_tokens} tokens of a fresh prompt of "
            f"{num_tokens}: its time says nothing"
        )
    return timed.first_token_s


def decode_round(
    bench: Bench, num_streams: int, first_number: int, max_tokens: int | None, *, ignore_eos: bool = False
) -> DecodeRound:
    """Run num_streams different chats at once, to their natural ends unless ignore_eos."""

    def job(number: int) -> Callable[[], Timed]:
        return lambda: bench.ask(number, max_tokens, ignore_eos=ignore_eos)

    return round_of(at_once([job(first_number + at) for at in range(num_streams)]))


def round_of(streams: Sequence[Timed]) -> DecodeRound:
    """Put the streams of one round together."""
    total = sum(stream.completion_tokens for stream in streams)
    ended_s = max(stream.last_token_s for stream in streams)
    begun_s = min(stream.begun_s for stream in streams)
    first_s = min(stream.first_s for stream in streams)
    return DecodeRound(
        aggregate=total / max(ended_s - begun_s, 1e-9),
        after_first=total / max(ended_s - first_s, 1e-9),
        per_stream=tuple(rate for stream in streams if (rate := stream.decode_tok_s) is not None),
        server_per_stream=tuple(rate for stream in streams if (rate := stream.server_decode_tok_s)),
        completion_tokens=tuple(stream.completion_tokens for stream in streams),
        finishes=tuple(stream.finish for stream in streams),
        first_token_s=tuple(stream.first_token_s for stream in streams),
    )


def deep_decode_run(bench: Bench, num_tokens: int, max_tokens: int) -> float | None:
    """Give the decode rate of one stream behind a long prompt."""
    return bench.prompt(bench.random_ids(num_tokens), max_tokens).decode_tok_s


def second_turn_run(bench: Bench, num_tokens: int, new_tokens: int, max_tokens: int) -> dict[str, float]:
    """Prompt, then prompt again with the same tokens, the answer and some new ones, as an agent does."""
    ids = bench.random_ids(num_tokens)
    first = bench.prompt(ids, max_tokens)
    second = bench.prompt([*ids, *first.output_ids, *bench.random_ids(new_tokens)], max_tokens)
    return {
        "first_turn_s": first.first_token_s,
        "second_turn_s": second.first_token_s,
        "second_prompt_tokens": second.prompt_tokens,
        "second_cached_tokens": second.cached_tokens,
    }


def beside_run(bench: Bench, num_tokens: int, alone_tokens: int) -> dict[str, float]:
    """Let one stream decode, first alone, then while another client's long prompt is read, and cut it then.

    The server counts a few tokens of the cut stream that nobody receives. Raises BenchError when the stream
    was over before the prompt was read.
    """
    may_start, is_read = threading.Event(), threading.Event()
    found: list[Timed] = []

    def read_prompt() -> None:
        may_start.wait()
        try:
            found.append(bench.prompt(bench.random_ids(num_tokens), 1))
        finally:
            is_read.set()

    def watch(num_arrived: int) -> bool:
        if num_arrived > alone_tokens:
            may_start.set()
        return is_read.is_set()

    reader = threading.Thread(target=read_prompt, daemon=True)
    reader.start()
    room = bench.context_tokens - MARGIN_TOKENS
    try:
        stream = bench.prompter(bench.client, bench.random_ids(16), room, watch)
    finally:
        may_start.set()
        reader.join()
    if not found:
        raise BenchError(f"the prompt of {num_tokens} tokens beside a stream was not answered")
    prompt = found[0]
    if stream.last_token_s < prompt.first_s:
        raise BenchError(f"the stream ended before the prompt of {num_tokens} tokens beside it was read")
    return _rates_beside(stream, prompt)


def _rates_beside(stream: Timed, prompt: Timed) -> dict[str, float]:
    """Give a stream's rate before and while a prompt was read, from the times of its events."""
    before = [(at, count) for at, count in stream.arrivals if at < prompt.begun_s]
    during = [(at, count) for at, count in stream.arrivals if prompt.begun_s <= at <= prompt.first_s]
    times = [prompt.begun_s, *(at for at, _ in during), prompt.first_s]
    return {
        "alone_tok_s": (before[-1][1] - before[0][1]) / max(before[-1][0] - before[0][0], 1e-9),
        "during_prefill_tok_s": (during[-1][1] - before[-1][1] if during else 0) / prompt.first_token_s,
        "longest_gap_s": max(after - at for at, after in pairwise(times)),
        "prefill_s": prompt.first_token_s,
    }


def _id_range(client: Client, pages: dict[str, Any]) -> tuple[int, int]:
    """Find ids that stand for text: the middle of the vocabulary, or what the tokenizer makes of text."""
    limits = (pages.get("stats") or {}).get("limits") or {}
    size = limits.get("vocab_size") or (pages.get("server_info") or {}).get("vocab_size")
    if not isinstance(size, int):
        try:
            size = max(client.post("/tokenize", {"prompt": " ".join(TASKS)})["tokens"])
        except (BenchError, KeyError, TypeError, ValueError) as error:
            raise BenchError("the server tells no size of its vocabulary; give --ids LOW HIGH") from error
    return min(1000, size // 4), size * 19 // 20


def context_tokens(pages: dict[str, Any]) -> int:
    """Give the longest sequence that the server takes, as it says (facts.server_facts)."""
    models = (pages.get("models") or {}).get("data") or [{}]
    length = models[0].get("max_model_len") or (pages.get("server_info") or {}).get("context_length")
    return int(length) if length else FALLBACK_CONTEXT
