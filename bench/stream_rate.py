"""`python bench/stream_rate.py [--url URL]`: does a stream's text arrive evenly? Standard library only.

Sends a chat request to a running server and notes when every event arrives. Time runs from the first text to
the last. A stream passes when half of its time brings at least 40 % of its text, and its last second at most
10 %: a server or proxy that collects text and lets it go at the end fails both.

With --streams N, as many answers are asked for at the same moment, and each is judged between the latest
first text and the earliest last one, where all of them run: a server shared by four is faster for whoever is
alone at the end, which is no fault. All must pass.

So that a last second can hold so little, the stream must last over 10 s. How many tokens that takes the
check finds out: it begins with 512 and asks for a longer answer as long as all text comes too soon and the
server's context has room. One answer is judged, the last, and its length is settled before its evenness is
looked at. With --max-tokens there is one request, of that length.

Exit code: 0 passed; 1 failed; 2 nothing to judge (too short, refused, broken).
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

MIN_SECONDS = 10.0
MIN_HALF_SHARE = 0.40
MAX_LAST_SECOND = 0.10
TIMEOUT_S = 300.0

FIRST_TOKENS = 512
ENOUGH_SECONDS = 12.5
"""An even stream's last second then holds 8 %; one of barely MIN_SECONDS would fail by chance."""
WANTED_SECONDS = 15.0
"""What a longer answer is to last by the rate so far, which may rise by a fifth and still give enough."""
MAX_ANSWER_SECONDS = 60.0
"""The same with its wait for the first text: text that is held back looks endlessly fast."""
MAX_TRIES = 4

HINT = "raise --max-tokens, unless text was held back"

Clock = Callable[[], float]


class NothingToJudge(Exception):
    """The stream was refused, broke, or is too short."""


class Refused(NothingToJudge):
    """The server answered with an error status."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event with text: seconds since the request, characters."""

    time_s: float
    num_chars: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream, read to its end. Tokens of prompt and answer as the server counts them, or None."""

    arrivals: tuple[Arrival, ...]
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from the first text to the last."""
        return self.arrivals[-1].time_s - self.arrivals[0].time_s


class Together:
    """Asks for several answers at once. answers: those of the last call, cut to the time when all ran."""

    def __init__(self, ask: Callable[[int, int, float], Answer], num_streams: int, clock: Clock) -> None:
        """ask: for so many tokens, as stream number so-and-so, with times since a moment of the clock; called
        from a thread each."""
        self._ask = ask
        self._num_streams = num_streams
        self._clock = clock
        self.answers: tuple[Answer, ...] = ()

    def __call__(self, num_tokens: int) -> Answer:
        """Ask; gives the answer with the least text. Raises NothingToJudge."""
        begin_s, numbers = self._clock(), range(self._num_streams)
        with ThreadPoolExecutor(self._num_streams) as pool:
            asked = [pool.submit(self._ask, num_tokens, number, begin_s) for number in numbers]
            whole = [each.result() for each in asked]
        self.answers = overlap(whole)
        return min(self.answers, key=lambda answer: sum(each.num_chars for each in answer.arrivals))


def overlap(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Cut answers to the time from the latest first text to the earliest last one.

    Raises NothingToJudge where there is no such time: the server takes them one by one.
    """
    if any(not answer.arrivals for answer in answers):
        raise NothingToJudge("a stream came without text")
    begin_s = max(answer.arrivals[0].time_s for answer in answers)
    end_s = min(answer.arrivals[-1].time_s for answer in answers)
    if begin_s >= end_s and len(answers) > 1:
        raise NothingToJudge("the streams did not run at the same time")
    return tuple(
        replace(answer, arrivals=tuple(each for each in answer.arrivals if begin_s <= each.time_s <= end_s))
        for answer in answers
    )


Ask = Callable[[int], Answer]
"""Asks for so many tokens. Raises NothingToJudge."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How even a stream was. gaps: seconds between its events with text."""

    duration_s: float
    num_chars: int
    half_share: float
    last_second_share: float
    gaps_s: tuple[float, ...]

    @property
    def is_even(self) -> bool:
        return self.half_share >= MIN_HALF_SHARE and self.last_second_share <= MAX_LAST_SECOND


def judge(arrivals: Sequence[Arrival], why_so_short: str = HINT) -> Verdict:
    """Measure a stream. Raises NothingToJudge, with the reason, when it is shorter than MIN_SECONDS."""
    if len(arrivals) < 2:
        raise NothingToJudge(f"{len(arrivals)} events with text came")
    begin_s, end_s = arrivals[0].time_s, arrivals[-1].time_s
    duration_s = end_s - begin_s
    if duration_s < MIN_SECONDS:
        raise NothingToJudge(f"all text came within {duration_s:.1f} s: {why_so_short}")
    total = sum(arrival.num_chars for arrival in arrivals)
    half = sum(a.num_chars for a in arrivals if a.time_s <= begin_s + duration_s / 2)
    last = sum(a.num_chars for a in arrivals if a.time_s > end_s - 1.0)
    gaps = tuple(b.time_s - a.time_s for a, b in itertools.pairwise(arrivals))
    return Verdict(duration_s, total, half / total, last / total, gaps)


def long_answer(ask: Ask, context_tokens: int | None, say: Callable[[str], None]) -> tuple[Answer, str]:
    """Ask for longer answers until one lasts ENOUGH_SECONDS; gives the last, and why none is longer.

    context_tokens: the longest sequence of the server, None where it does not tell. Raises NothingToJudge
    when the first request fails, or a later one otherwise than by a refusal.
    """
    num_tokens = FIRST_TOKENS
    answer = ask(num_tokens)
    for _ in range(MAX_TRIES - 1):
        if len(answer.arrivals) < 2 or answer.duration_s >= ENOUGH_SECONDS:
            return answer, ""
        wait_s, ended_at = answer.arrivals[0].time_s, answer.completion_tokens
        if wait_s >= MIN_SECONDS:  # a longer answer could wait as much longer
            return answer, f"the first after {wait_s:.1f} s, so it was held back, or the server is busy"
        if ended_at is not None and ended_at < num_tokens:
            return answer, f"the server ends an answer at {ended_at} tokens, as at the end of its context"
        more = longer(answer, num_tokens, context_tokens)
        if more <= num_tokens:
            return answer, f"the context of {context_tokens} tokens holds no longer answer"
        say(f"{num_tokens} tokens came within {answer.duration_s:.1f} s, too soon: asking for {more}")
        try:
            answer = ask(more)
        except Refused as error:
            return answer, f"an answer of {more} tokens was refused ({error})"
        num_tokens = more
    return answer, f"the last of {MAX_TRIES} answers, each longer: {HINT}"


def longer(answer: Answer, num_tokens: int, context_tokens: int | None) -> int:
    """Give the tokens of an answer that lasts WANTED_SECONDS at this one's rate, if the context has room."""
    duration_s = max(answer.duration_s, 1e-3)
    factor = min(WANTED_SECONDS / duration_s, MAX_ANSWER_SECONDS / max(answer.arrivals[-1].time_s, 1e-3))
    wanted = math.ceil(num_tokens * factor)
    return wanted if context_tokens is None else min(wanted, context_tokens - (answer.prompt_tokens or 0))


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. url: without /v1. key: sent as a bearer token."""

    url: str
    key: str = ""
    clock: Clock = time.monotonic

    def read_stream(self, body: bytes, begin_s: float) -> Answer:
        """Send a chat request and read it to its end. Raises NothingToJudge.

        begin_s: from when its times count, by the clock.
        """
        arrivals: list[Arrival] = []
        usage: dict[str, Any] = {}
        with self._answer("POST", "/v1/chat/completions", body) as answer:
            for line in iter(answer.readline, b""):
                if line.startswith(b"data: [DONE]"):
                    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
                    return Answer(tuple(arrivals), *counts)
                event = read_event(line)
                usage = event.get("usage") or usage
                num_chars = text_chars(event)
                if num_chars:
                    arrivals.append(Arrival(self.clock() - begin_s, num_chars))
        raise NothingToJudge("the stream ended without [DONE]")

    def context_tokens(self) -> int | None:
        """Ask for the longest sequence that it takes; None where it does not tell."""
        try:
            with self._answer("GET", "/v1/models") as answer:
                length = json.load(answer)["data"][0].get("max_model_len")
        except (NothingToJudge, ValueError, LookupError, TypeError, AttributeError):
            return None
        return length if isinstance(length, int) else None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=TIMEOUT_S)
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, f"{parts.path.rstrip('/')}{path}", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise NothingToJudge(f"{self.url}: {error}") from error
        finally:
            connection.close()


def read_event(line: bytes) -> dict[str, Any]:
    """Read one line of a stream; {} for one that is no event. Raises NothingToJudge for an error in it."""
    if not line.startswith(b"data: {"):
        return {}
    event: dict[str, Any] = json.loads(line[6:])
    if "error" in event:
        raise NothingToJudge(f"error in the stream: {event['error']['message']}")
    return event


def text_chars(event: dict[str, Any]) -> int:
    """Count the characters of reasoning, answer and call arguments in one event."""
    count = 0
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        count += len(delta.get("content") or "") + len(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            count += len(call["function"].get("arguments") or "")
    return count


def main(argv: Sequence[str] | None = None, clock: Clock = time.monotonic) -> int:
    """Run, print the figures, give the exit code."""
    options = _parser().parse_args(argv)
    server = Server(options.url, os.environ.get("GLM53_API_KEY", "").partition(",")[0], clock)

    def ask(num_tokens: int, number: int, begin_s: float) -> Answer:
        fields = {
            "messages": [{"role": "user", "content": options.prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": options.seed + number,
        }
        return server.read_stream(json.dumps(fields).encode(), begin_s)

    together = Together(ask, options.streams, clock)
    try:
        why_no_longer = HINT
        if options.max_tokens is None:
            _, why_no_longer = long_answer(together, server.context_tokens(), _say)
        else:
            together(options.max_tokens)
        verdicts = [judge(answer.arrivals, why_no_longer) for answer in together.answers]
    except NothingToJudge as error:
        _say(f"nothing to judge: {error}")
        return 2
    firsts_s = [answer.arrivals[0].time_s for answer in together.answers]
    report(verdicts, firsts_s, as_json=options.json)
    return 0 if all(verdict.is_even for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/stream_rate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default=f"http://127.0.0.1:{os.environ.get('PORT', '30000')}")
    parser.add_argument("--max-tokens", type=int, help="of the one answer (default: as many as it takes)")
    parser.add_argument("--prompt", default="Write a long story about a lighthouse keeper.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=_count, default=1, help="answers at the same time (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    return parser


def _say(text: str) -> None:
    """Print beside the figures, at once."""
    print(text, file=sys.stderr, flush=True)


def report(verdicts: Sequence[Verdict], firsts_s: Sequence[float], *, as_json: bool) -> None:
    """Print verdicts: one stream's figures, or those of several and what is said of all."""
    figures = [_figures(*each) for each in zip(verdicts, firsts_s, strict=True)]
    passed = all(verdict.is_even for verdict in verdicts)
    if as_json:
        print(json.dumps(figures[0] if len(figures) == 1 else {"streams": figures, "passed": passed}))
        return
    for name in figures[0]:
        print(f"{name:>18}  " + "  ".join(f"{each[name]!s:<8}" for each in figures).rstrip())
    word = "PASS" if passed else "FAIL"
    print(
        f"{word}: half of the time brings at least {MIN_HALF_SHARE:.0%}, "
        f"the last second at most {MAX_LAST_SECOND:.0%}"
    )


def _figures(verdict: Verdict, first_text_s: float) -> dict[str, float | bool]:
    gaps = sorted(verdict.gaps_s)
    return {
        "first_text_s": round(first_text_s, 3),
        "duration_s": round(verdict.duration_s, 3),
        "chars": verdict.num_chars,
        "half_share": round(verdict.half_share, 3),
        "last_second_share": round(verdict.last_second_share, 3),
        "gap_median_ms": round(statistics.median(gaps) * 1e3, 1),
        "gap_p99_ms": round(gaps[len(gaps) * 99 // 100] * 1e3, 1),
        "gap_max_ms": round(gaps[-1] * 1e3, 1),
        "passed": verdict.is_even,
    }


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
