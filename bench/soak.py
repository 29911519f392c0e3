"""`python bench/soak.py [--url URL] [--requests N | --minutes M]`: chaos against a running server.

Standard library only. Many clients at once send requests and leave each at a stage that dice choose: whole
answers, whole streams, several choices, constrained answers, half a body and no more, a body that is no JSON,
one that is too large, a wrong length, closing at once, after the headers, after some events, a reset, half a
close, reading very slowly. A process of its own asks /health on its own connections all the while.

Passes when no answer is a 5xx other than 503 and 504, every whole request got a whole answer, /health always
answered 200 within --health-ms (plus the longest pause that a server which does nothing shows beside it: on
a busy machine every process waits for its turn), and in the end /stats, where it is served, shows that
nothing runs or waits. Exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.probes import WAIT_S, HealthProbe, IdleServer, describe_times, get

WORDS = ("garden", "fox", "late", "tide", "harbour", "seven", "café", "東京", "\U0001f642")


@dataclass(slots=True)
class Tally:
    """What happened. problems: one line each, the first hundred."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Note something that must not happen."""
        if len(self.problems) < 100:
            self.problems.append(text)


@dataclass(frozen=True, slots=True)
class Target:
    """The server. key: sent as a Bearer token. max_body_bytes: what the server takes, at most."""

    host: str
    port: int
    key: str | None = None
    max_body_bytes: int = 32 * 2**20

    def head(self, length: int) -> bytes:
        """Give the head of a chat request."""
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        ).encode()


class ChaosClient:
    """Sends one request after the other, each of a kind that its dice choose."""

    def __init__(self, target: Target, seed: int, tally: Tally) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._tally = tally
        self._kinds: dict[str, Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]] = {
            "whole": self._whole,
            "stream": self._stream,
            "constrained": self._constrained,
            "half_body": self._half_body,
            "no_json": self._no_json,
            "huge": self._huge,
            "short_length": self._short_length,
            "at_once": self._at_once,
            "headers": self._headers,
            "events": self._events,
            "reset": self._reset,
            "half_close": self._half_close,
            "slow_reader": self._slow_reader,
        }

    async def send(self) -> None:
        """One request of any kind."""
        kind = self._rng.choice(tuple(self._kinds))
        self._tally.kinds[kind] += 1
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_connection(
                    self._target.host, self._target.port, limit=2**22
                )
                try:
                    await self._kinds[kind](reader, writer)
                finally:
                    writer.close()
        except TimeoutError:
            self._tally.problem(f"{kind}: no end within {WAIT_S:g} s")
        except (OSError, asyncio.IncompleteReadError) as error:
            if kind in ("whole", "stream", "constrained"):
                self._tally.problem(f"{kind}: {error!r}")

    def _body(self, **fields: object) -> bytes:
        rng = self._rng
        text = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 40, 400))))
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": rng.randint(1, 24),
            "seed": rng.randint(0, 1000),
            "n": rng.choice((1, 1, 1, 2)),
            **fields,
        }
        return json.dumps(body).encode()

    async def _post(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(self._target.head(len(body)) + body)
        await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Read a response to its end, and judge its status."""
        data = await reader.read(-1)
        status = int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0
        self._tally.statuses[status] += 1
        if status == 0 or (status >= 500 and status not in (503, 504)):
            self._tally.problem(f"status {status}: {data[-300:]!r}")
        return status, data

    async def _whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, self._body())
        status, data = await self._answer(reader)
        if status == 200 and b'"usage"' not in data:
            self._tally.problem(f"an answer without its end: {data[-200:]!r}")
        elif status not in (200, 429, 503, 504):
            self._tally.problem(f"whole: status {status}")

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, self._body(stream=True))
        status, data = await self._answer(reader)
        if status == 200 and data.count(b"data: [DONE]") != 1:
            self._tally.problem(f"a stream without its end: {data[-200:]!r}")

    async def _constrained(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        off = {"enable_thinking": False}
        body = self._body(guided_choice=["yes", "no"], chat_template_kwargs=off, max_tokens=24, n=1)
        await self._post(writer, body)
        status, data = await self._answer(reader)
        if status == 200:
            message = json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
            if message["content"] not in ("yes", "no"):
                self._tally.problem(f"constrained: {message}")

    async def _half_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = self._body()
        writer.write(self._target.head(len(body)) + body[: len(body) // 2])
        await writer.drain()
        await asyncio.sleep(self._rng.random() * 0.05)

    async def _no_json(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(
            writer, self._rng.choice((b"{", b"[]", b"\xff\xfe", b"", b"null", b'{"messages": 7}'))
        )
        status, _ = await self._answer(reader)
        if status != 400:
            self._tally.problem(f"a broken body: status {status}")

    async def _huge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Announce far too much, or send a little too much; the server may hang up on either."""
        if self._rng.random() < 0.9:
            writer.write(self._target.head(100 * self._target.max_body_bytes) + b"x" * 65536)
        else:
            writer.write(self._target.head(self._target.max_body_bytes + 1))
            piece = b" " * 2**20
            for _ in range(self._target.max_body_bytes // len(piece)):
                writer.write(piece)
                await writer.drain()
            writer.write(b" ")
        status, _ = await self._answer(reader)
        if status != 413:
            self._tally.problem(f"a huge body: status {status}")

    async def _short_length(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """More comes than was announced."""
        body = self._body()
        writer.write(self._target.head(len(body) - 5) + body)
        status, _ = await self._answer(reader)
        if status != 400:
            self._tally.problem(f"a wrong length: status {status}")

    async def _at_once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, self._body(stream=True))

    async def _headers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, self._body(stream=True, max_tokens=500))
        await reader.readuntil(b"\r\n\r\n")

    async def _events(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, self._body(stream=True, max_tokens=500))
        for _ in range(self._rng.randint(8, 30)):
            await reader.readline()

    async def _reset(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._events(reader, writer)
        writer.transport.abort()

    async def _half_close(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say that nothing more will be sent; servers take that for leaving, and may."""
        await self._post(writer, self._body(stream=True))
        writer.write_eof()
        await reader.read(-1)

    async def _slow_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, self._body(stream=True, logprobs=True, top_logprobs=20))
        for _ in range(20):
            await reader.read(256)
            await asyncio.sleep(0.02)


async def run_chaos(
    target: Target, tally: Tally, *, num_clients: int, num_requests: int, end_s: float | None, seed: int
) -> None:
    """Send requests until num_requests are out, or until time.monotonic() reaches end_s."""
    left = num_requests

    async def work(client: ChaosClient) -> None:
        nonlocal left
        while left > 0 if end_s is None else time.monotonic() < end_s:
            left -= 1
            await client.send()

    async with asyncio.TaskGroup() as group:
        for at in range(num_clients):
            group.create_task(work(ChaosClient(target, seed + at, tally)))


def judge_health(answers: Sequence[tuple[int, float]], limit_s: float, tally: Tally) -> str:
    """Note failed and slow probes; gives a line about all of them."""
    if not answers:
        tally.problem("/health was never asked")
        return "no probe"
    for status, seconds in answers:
        if status != 200 or seconds > limit_s:
            tally.problem(f"/health: status {status} after {seconds * 1e3:.0f} ms")
    return describe_times(answers)


def judge_rest(url: str, key: str | None, tally: Tally) -> str:
    """Wait until /stats, where there is one, shows that nothing runs or waits."""
    end_s = time.monotonic() + 15
    while True:
        try:
            status, body = get(url, "/stats", key)
        except OSError as error:
            tally.problem(f"/stats: {error}")
            return "the server is gone"
        if status != 200:
            return f"/stats: {status}, not looked at"
        busy = busy_counts(json.loads(body))
        if not any(busy.values()):
            return f"/stats at rest: {busy}"
        if time.monotonic() > end_s:
            tally.problem(f"not at rest after 15 s: {busy}")
            return f"/stats: {busy}"
        time.sleep(0.1)


def busy_counts(stats: object) -> dict[str, int]:
    """Find the numbers that must be 0 at rest, wherever they stand."""
    found: dict[str, int] = {}
    todo = [stats]
    while todo:
        current = todo.pop()
        if isinstance(current, dict):
            for name, value in current.items():
                if name in ("num_running", "num_waiting", "num_pages_used"):
                    found[name] = value
                todo.append(value)
    return found


def soak(options: argparse.Namespace) -> Tally:
    """Run the chaos and judge it; prints what it saw."""
    parts = urllib.parse.urlsplit(options.url)
    target = Target(
        parts.hostname or "127.0.0.1", parts.port or 80, options.key, options.max_body_mib * 2**20
    )
    tally = Tally()
    begin_s = time.monotonic()
    end_s = None if options.minutes is None else begin_s + 60 * options.minutes
    idle_server = IdleServer()
    health, control = HealthProbe(options.url), HealthProbe(idle_server.url)
    try:
        asyncio.run(
            run_chaos(
                target,
                tally,
                num_clients=options.clients,
                num_requests=options.requests,
                end_s=end_s,
                seed=options.seed,
            )
        )
    finally:
        answers, control_answers = health.stop(), control.stop()
        idle_server.stop()
    took_s = time.monotonic() - begin_s
    print(f"{sum(tally.kinds.values())} requests in {took_s:.1f} s by {options.clients} clients")
    print("kinds   ", dict(sorted(tally.kinds.items())))
    print("statuses", dict(sorted(tally.statuses.items())))
    pause_s = max((seconds for _, seconds in control_answers), default=0.0)
    print(f"a server that does nothing: {describe_times(control_answers)}")
    print(f"/health: {judge_health(answers, options.health_ms / 1e3 + pause_s, tally)}")
    print(judge_rest(options.url, options.key, tally))
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and give the exit code."""
    parser = argparse.ArgumentParser(prog="bench/soak.py", description=__doc__)
    parser.add_argument("--url", default=f"http://127.0.0.1:{os.environ.get('PORT', '30000')}")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="run so long, in place of --requests")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-body-mib", type=int, default=32, help="the server's --max-body-mib")
    parser.add_argument("--health-ms", type=float, default=100.0)
    options = parser.parse_args(argv)
    options.key = os.environ.get("GLM53_API_KEY", "").partition(",")[0] or None
    tally = soak(options)
    for problem in tally.problems:
        print("PROBLEM", problem)
    print("FAIL" if tally.problems else "PASS")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
