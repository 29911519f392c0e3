"""What watches a server from beside: a process that asks /health, and one that shows what the machine costs.

    python bench/probes.py probe URL     until standard input closes; then the answers as JSON
    python bench/probes.py idle          a server that does nothing; its port on standard output

Processes of their own, so that neither waits for the client's other work. Standard library only.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence

WAIT_S = 120.0
PROBE_INTERVAL_S = 0.05


class IdleServer:
    """A process that answers every request at once and does nothing else: what the machine itself costs."""

    def __init__(self) -> None:
        command = [sys.executable, os.path.abspath(__file__), "idle"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None, "a pipe was asked for"
        self.url = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"

    def stop(self) -> None:
        """End it."""
        self._process.communicate("", timeout=WAIT_S)


async def idle() -> None:
    """Be the process of IdleServer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


class HealthProbe:
    """A process that asks /health on one connection until its standard input closes."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, os.path.abspath(__file__), "probe", url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self) -> list[tuple[int, float]]:
        """End it; gives (status, seconds) of every answer."""
        out, _ = self._process.communicate("", timeout=WAIT_S)
        return [(status, seconds) for status, seconds in json.loads(out)]


def probe(url: str) -> None:
    """Be the process of HealthProbe."""
    answers = []
    while not select.select([sys.stdin], [], [], PROBE_INTERVAL_S)[0]:  # readable at its end, and only then
        begin_s = time.perf_counter()
        try:
            status = get(url, "/health")[0]
        except OSError:
            status = 0
        answers.append((status, time.perf_counter() - begin_s))
    print(json.dumps(answers))


def get(url: str, path: str, key: str | None = None) -> tuple[int, bytes]:
    """Fetch one path on a fresh connection."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def describe_times(answers: Sequence[tuple[int, float]]) -> str:
    """Give a line about the times of probes."""
    if not answers:
        return "never asked"
    times_ms = sorted(seconds * 1e3 for _, seconds in answers)
    return (
        f"{len(answers)} times, median {times_ms[len(times_ms) // 2]:.1f} ms, "
        f"p99 {times_ms[len(times_ms) * 99 // 100]:.1f} ms, most {times_ms[-1]:.1f} ms"
    )


def main(argv: Sequence[str]) -> int:
    """Be one of the two processes, and give the exit code."""
    match argv:
        case ["idle"]:
            asyncio.run(idle())
        case ["probe", url]:
            probe(url)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
