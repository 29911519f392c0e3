"""`python bench/stream_rate.py [--url URL]`: does a stream's text arrive evenly? Standard library only.

Sends one chat request to a running server and notes when every event arrives. Time runs from the first text
to the last. A stream passes when half of its time brings at least 40 % of its text, and its last second at
most 10 %: a server or proxy that collects text and lets it go at the end fails both. So that a last second
can hold so little, the stream must last over 10 s: raise --max-tokens on a fast server.

Exit code: 0 passed; 1 failed; 2 nothing to judge (too short, refused, broken).
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MIN_SECONDS = 10.0
MIN_HALF_SHARE = 0.40
MAX_LAST_SECOND = 0.10
TIMEOUT_S = 300.0


class NothingToJudge(Exception):
    """The stream was refused, broke, or is too short."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event with text: seconds since the request, characters."""

    time_s: float
    num_chars: int


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


def judge(arrivals: Sequence[Arrival]) -> Verdict:
    """Measure a stream. Raises NothingToJudge when it is shorter than MIN_SECONDS."""
    if len(arrivals) < 2:
        raise NothingToJudge(f"{len(arrivals)} events with text came")
    begin_s, end_s = arrivals[0].time_s, arrivals[-1].time_s
    duration_s = end_s - begin_s
    if duration_s < MIN_SECONDS:
        raise NothingToJudge(
            f"all text came within {duration_s:.1f} s: raise --max-tokens, unless text was held back"
        )
    total = sum(arrival.num_chars for arrival in arrivals)
    half = sum(a.num_chars for a in arrivals if a.time_s <= begin_s + duration_s / 2)
    last = sum(a.num_chars for a in arrivals if a.time_s > end_s - 1.0)
    gaps = tuple(b.time_s - a.time_s for a, b in itertools.pairwise(arrivals))
    return Verdict(duration_s, total, half / total, last / total, gaps)


def read_stream(url: str, body: bytes, key: str | None) -> Iterator[Arrival]:
    """Send a chat request; give every event that brings text, when it comes. Raises NothingToJudge."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=TIMEOUT_S)
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    begin_s = time.monotonic()
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise NothingToJudge(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in iter(answer.readline, b""):
            num_chars = text_chars(line)
            if num_chars:
                yield Arrival(time.monotonic() - begin_s, num_chars)
            elif line.startswith(b"data: [DONE]"):
                return
        raise NothingToJudge("the stream ended without [DONE]")
    except OSError as error:
        raise NothingToJudge(f"{url}: {error}") from error
    finally:
        connection.close()


def text_chars(line: bytes) -> int:
    """Count the characters of reasoning, answer and call arguments in one line of a stream."""
    if not line.startswith(b"data: {"):
        return 0
    event = json.loads(line[6:])
    if "error" in event:
        raise NothingToJudge(f"error in the stream: {event['error']['message']}")
    count = 0
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        count += len(delta.get("content") or "") + len(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            count += len(call["function"].get("arguments") or "")
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures, give the exit code."""
    parser = argparse.ArgumentParser(prog="bench/stream_rate.py", description=__doc__)
    parser.add_argument("--url", default=f"http://127.0.0.1:{os.environ.get('PORT', '30000')}")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--prompt", default="Write a long story about a lighthouse keeper.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    options = parser.parse_args(argv)
    fields = {
        "messages": [{"role": "user", "content": options.prompt}],
        "stream": True,
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
        "seed": options.seed,
    }
    try:
        arrivals = list(
            read_stream(
                options.url,
                json.dumps(fields).encode(),
                os.environ.get("GLM53_API_KEY", "").partition(",")[0],
            )
        )
        verdict = judge(arrivals)
    except NothingToJudge as error:
        print(f"nothing to judge: {error}", file=sys.stderr)
        return 2
    report(verdict, arrivals[0].time_s, as_json=options.json)
    return 0 if verdict.is_even else 1


def report(verdict: Verdict, first_text_s: float, *, as_json: bool) -> None:
    """Print a verdict."""
    gaps = sorted(verdict.gaps_s)
    figures = {
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
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:>18}  {value}")
    word = "PASS" if verdict.is_even else "FAIL"
    print(
        f"{word}: half of the time brings at least {MIN_HALF_SHARE:.0%}, "
        f"the last second at most {MAX_LAST_SECOND:.0%}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
