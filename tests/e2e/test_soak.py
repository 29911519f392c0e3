"""Two hundred requests by eight clients that leave at every stage, against the real engine in this process.

In one process, because what must not leak is to be counted: slots, pages, tasks, memory.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypercorn.asyncio import serve as serve_hypercorn
from hypercorn.config import Config as HypercornConfig

from glm53srv.api.app import create_app
from glm53srv.api.lifecycle import Lifecycle
from glm53srv.api.loading import checkpoint_loader, scheduler_settings
from glm53srv.config import load_config
from glm53srv.listener import open_socket
from glm53srv.scheduler.loop import StepLoop

NUM_REQUESTS = 200
NUM_CLIENTS = 8
WARM_UP_REQUESTS = (
    40  # caches of tokens, arrays and connections fill in these; memory is measured from here on
)
MAX_GROWTH_BYTES = 24 * 2**20
"""Growth of resident memory over the last 160 requests: the allocator's own noise is a few MiB; a leaked
sequence state (0.8 MiB) or its pages per aborted request would be over a hundred."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def chat_body(rng: random.Random, *, stream: bool) -> bytes:
    words = rng.choice([1, 5, 40, 700])
    body = {
        "messages": [{"role": "user", "content": " ".join(rng.choices(["garden", "fox", "late"], k=words))}],
        "max_tokens": rng.randint(1, 16),
        "stream": stream,
        "n": rng.choice([1, 1, 1, 2]),
        "seed": rng.randint(0, 1000),
    }
    return json.dumps(body).encode()


def request_bytes(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


class Client:
    """Sends requests one after the other, and leaves each at the stage that its dice say."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def send(self) -> None:
        """One request, whole or broken off."""
        kind = self._rng.choice(
            ["whole", "whole_stream", "half_body", "at_once", "headers", "events", "reset"]
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            message = request_bytes(chat_body(self._rng, stream=kind != "whole"))
            writer.write(message[: len(message) // 2] if kind == "half_body" else message)
            await writer.drain()
            await self._read(kind, reader)
            if kind == "reset":
                writer.transport.abort()
        finally:
            writer.close()
        self.outcomes[kind] += 1

    async def _read(self, kind: str, reader: asyncio.StreamReader) -> None:
        if kind in ("whole", "whole_stream"):
            answer = await reader.read()
            status = answer.split(b" ", 2)[1]
            assert status == b"200", answer[:300]
            if kind == "whole_stream":
                assert answer.count(b"data: [DONE]") == 1
        elif kind == "headers":
            await reader.readuntil(b"\r\n\r\n")
        elif kind in ("events", "reset"):
            for _ in range(self._rng.randint(1, 6)):
                await reader.readline()


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds that the server reaches by itself; 10 s are far more than it needs."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # the server sets no event for a test to wait on
            await asyncio.sleep(0.01)


async def run_clients(port: int, num_requests: int, seed: int) -> Counter[str]:
    clients = [Client(port, seed + at) for at in range(NUM_CLIENTS)]

    async def work(client: Client) -> None:
        for _ in range(num_requests // NUM_CLIENTS):
            await client.send()

    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(work(client))
    return sum((client.outcomes for client in clients), Counter())


def is_idle(steps: StepLoop) -> bool:
    stats = steps.stats()
    return stats.num_running == 0 and stats.num_waiting == 0 and stats.num_pages_used == 0


async def soak(model_dir: Path) -> None:
    config = load_config(["--model", str(model_dir), "--port", "0", "--chunk-tokens", "128"], {})
    lifecycle = Lifecycle(checkpoint_loader(config), scheduler_settings(config))
    listener = open_socket(config.server)
    port = listener.getsockname()[1]
    hypercorn = HypercornConfig()
    hypercorn.bind = [f"fd://{listener.detach()}"]
    hypercorn.accesslog = None
    stop = asyncio.Event()
    app = create_app(lifecycle, config.server)
    server = asyncio.create_task(
        serve_hypercorn(app, hypercorn, shutdown_trigger=stop.wait)  # type: ignore[arg-type]  # as in server.py
    )
    await lifecycle.wait_settled()
    running = lifecycle.state.require_running()
    baseline_tasks = len(asyncio.all_tasks())

    await run_clients(port, WARM_UP_REQUESTS, seed=1)
    before = resident_bytes()
    outcomes = await run_clients(port, NUM_REQUESTS - WARM_UP_REQUESTS, seed=1000)
    assert sum(outcomes.values()) == NUM_REQUESTS - WARM_UP_REQUESTS
    assert len(outcomes) == 7, outcomes  # every way to leave was taken

    await eventually(lambda: is_idle(running.steps))
    running.steps.check_integrity()
    await eventually(lambda: len(asyncio.all_tasks()) <= baseline_tasks)
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    stats = running.steps.stats()
    assert stats.total_requests == stats.total_finished + stats.total_aborted
    assert stats.total_aborted > 0

    stop.set()
    await server


def test_no_abort_leaks_a_slot_a_page_a_task_or_memory(random_model_dir: Path) -> None:
    asyncio.run(soak(random_model_dir))
