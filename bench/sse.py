"""`python -m bench.sse`: what one event of a chat stream costs the server, from sampled token to socket.

A source without an engine gives one token per turn of the event loop. Everything behind it is real:
detokenizer, stop strings, output parser, JSON, the response, the request log, hypercorn on uvloop. A client
in another process reads it all. The cost is the CPU time of this process between the request and the last
byte, over the number of events that arrived. `floor` is the same for equal-sized events from a bare ASGI
application: what hypercorn and the kernel take. Passes when the least of the repeats is below --target-us.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.types import ASGIApp, Receive, Scope, Send

from glm53srv.api.openai import prepare_chat
from glm53srv.api.routes import ApiContext, GenerationEndpoint, JsonEdge, RequestLog
from glm53srv.api.served import ServedModel
from glm53srv.api.state import Running, ServerState
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.model.pack_tokenizer import train_tokenizer
from glm53srv.request import FinishReason, GenerationRequest, SamplingParams, SequenceTimes, TokenEvent

TEXT = "The quick brown fox, however, is late for the meeting in the garden. "

CLIENT = """
import socket, sys
port, body = int(sys.argv[1]), sys.argv[2].encode()
with socket.create_connection(("127.0.0.1", port)) as s:
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n"
              b"content-length: %d\\r\\n\\r\\n%s" % (len(body), body))
    parts = []
    while data := s.recv(1 << 20):
        parts.append(data)
print(b"".join(parts).count(b"data: "))
"""


class TokenRun:
    """Gives `count` tokens of a text, one per turn of the event loop (service.TokenSource)."""

    def __init__(self, token_ids: Sequence[int], count: int) -> None:
        self._token_ids = token_ids
        self._count = count
        self._given = 0
        self.cached_tokens = 0
        self.times = SequenceTimes(submitted_s=0.0)

    async def next_events(self) -> tuple[TokenEvent, ...]:
        await asyncio.sleep(0)
        token_id = self._token_ids[self._given % len(self._token_ids)]
        self._given += 1
        finish = FinishReason.LENGTH if self._given == self._count else None
        return (TokenEvent(token_id, finish=finish),)

    def close(self) -> None:
        """Nothing runs."""

    def finish(self) -> None:
        """Nothing runs."""


class RunSource:
    """Stands where the step loop does."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def submit(self, request: GenerationRequest) -> TokenRun:
        assert request.max_tokens is not None, "the bench says how many"
        return TokenRun(self._token_ids, request.max_tokens)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Microseconds per event, one value per repeat."""

    name: str
    cpu_us: list[float]
    wall_us: list[float]

    def line(self) -> str:
        parts = []
        for kind, values in (("cpu", self.cpu_us), ("wall", self.wall_us)):
            parts.append(f"{kind} {min(values):5.1f} us least, {statistics.median(values):5.1f} median")
        return f"{self.name:>6}: {'; '.join(parts)}"


def chat_app(tokenizer: Tokenizer, threads: ThreadPoolExecutor) -> ASGIApp:
    """Build the chat endpoint over RunSource."""
    token_ids = tokenizer.encode_text(TEXT)
    model = ServedModel("bench", 0, tokenizer, 1 << 30, SamplingParams(temperature=0.0))
    state = ServerState()
    state.set_ready(Running(model, RunSource(token_ids)))  # type: ignore[arg-type]  # a StepSource is enough
    return RequestLog(JsonEdge(GenerationEndpoint(ApiContext(state, threads), prepare_chat, "chatcmpl")))


async def floor_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Send events of the usual size with nothing behind them."""
    if scope["type"] != "http":
        return
    body = await receive()
    count = orjson.loads(body["body"])["max_tokens"]
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    event = b"data: " + b"x" * 215 + b"\n\n"
    for _ in range(count):
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def measure(name: str, app: ASGIApp, num_events: int, repeats: int) -> Measurement:
    """Serve the application in this process, and read it from another, several times."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    sockets = config.create_sockets()
    listener = sockets.insecure_sockets[0]
    port = listener.getsockname()[1]
    listener.listen(16)
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = None
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "x"}]
    fields = {"stream": True, "max_tokens": num_events, "messages": messages}
    body = orjson.dumps({**fields, "chat_template_kwargs": {"enable_thinking": False}}).decode()
    cpu_us, wall_us = [], []
    for repeat in range(repeats + 1):  # the first warms up
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, str(port), body, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await client.communicate()
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        num_arrived = int(out)
        if num_arrived < num_events // 2:  # white space waits for what follows, so some tokens make no event
            raise RuntimeError(f"{name}: {num_arrived} events of {num_events} tokens arrived")
        if repeat:
            cpu_us.append(cpu_s / num_arrived * 1e6)
            wall_us.append(wall_s / num_arrived * 1e6)
    stop.set()
    await server
    return Measurement(name, cpu_us, wall_us)


async def run(arguments: argparse.Namespace) -> int:
    if arguments.tokenizer is not None:
        tokenizer = Tokenizer.load(arguments.tokenizer)
    else:
        tokenizer = Tokenizer(train_tokenizer(), source="the random model's")
    with ThreadPoolExecutor(1) as threads:
        chat = await measure("chat", chat_app(tokenizer, threads), arguments.events, arguments.repeats)
        floor = await measure("floor", floor_app, arguments.events, arguments.repeats)
    print(f"{machine()}, Python {platform.python_version()}, {arguments.events} tokens a run")
    for measurement in (chat, floor):
        print(measurement.line())
    is_met = min(chat.cpu_us) < arguments.target_us
    print(f"{'PASS' if is_met else 'FAIL'}: {min(chat.cpu_us):.1f} us, target {arguments.target_us:g} us")
    return 0 if is_met else 1


def machine() -> str:
    """Name the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sse", description=__doc__)
    parser.add_argument("--events", type=int, default=20_000, help="tokens of a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--target-us", type=float, default=40.0)
    parser.add_argument("--tokenizer", type=Path, help="model directory whose tokenizer to use")
    logging.basicConfig(level=logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
