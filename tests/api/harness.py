"""A whole application over the fake engine, driven through ASGI without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.types import Message

from glm53srv.api.app import create_app
from glm53srv.api.lifecycle import Lifecycle, Loaded
from glm53srv.api.loading import grammar_compiler
from glm53srv.api.served import ServedModel
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.config import ServerConfig
from glm53srv.engine.base import StepPlan
from glm53srv.engine.fake import FakeEngine
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.offload.report import OffloadReport
from glm53srv.progress import Progress
from glm53srv.request import SamplingParams
from glm53srv.scheduler.scheduler import SchedulerSettings
from tests.api.builders import small_tokenizer, split_markers
from tests.builders import make_limits

MODEL = "tiny-glm"
CREATED = 1_796_000_000


def ids_of(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """Give output tokens for text in which marker strings are the markers."""
    tokenizer = tokenizer or small_tokenizer()
    ids: list[int] = []
    for piece in split_markers(text):
        if isinstance(piece, str):
            ids += tokenizer.encode_text(piece)
        else:
            ids.append(tokenizer.control_id(piece.value) or 0)
    return ids


def end_ids() -> tuple[int, ...]:
    """The end ids of the small tokenizer: <|endoftext|>, <|user|>, <|observation|>."""
    names = ("<|endoftext|>", "<|user|>", "<|observation|>")
    return tuple(small_tokenizer().control_id(name) or 0 for name in names)


@functools.cache
def small_grammars() -> GrammarCompiler:
    """Constraints over the small tokenizer; safe to share, so one is enough."""
    return grammar_compiler(small_tokenizer(), end_ids())


@dataclass
class Server:
    """One application and what a test may look at or bend. scripts: output ids by request id."""

    app: Starlette
    lifecycle: Lifecycle
    engine: FakeEngine
    scripts: dict[str, list[int]]

    def script(self, request_id: str, text: str, *, end: str | None = None) -> None:
        """Let a request answer with text (markers spelled), ended by the named token."""
        ids = ids_of(text)
        if end is not None:
            ids.append(small_tokenizer().control_id(end) or 0)
        self.scripts[request_id] = ids

    @property
    def steps(self) -> Any:
        running = self.lifecycle.state.running
        assert running is not None
        return running.steps

    def check_idle(self) -> None:
        """Nothing runs, nothing waits, no page is taken."""
        self.steps.check_integrity()
        stats = self.steps.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


def make_server(
    *,
    before_step: Callable[[StepPlan], None] | None = None,
    before_load: Callable[[Progress], None] | None = None,
    max_streams: int = 4,
    max_queue: int = 64,
    max_context_tokens: int = 1024,
    keep_alive_s: float = 10.0,
    max_body_bytes: int = 2**20,
    drain_timeout_s: float = 30.0,
    defaults: SamplingParams | None = None,
    on_failure: Callable[[Exception], None] | None = None,
    handles_signals: bool = False,
    server_config: ServerConfig | None = None,
    offload_report: OffloadReport | None = None,
) -> Server:
    """Build an application; it loads when its lifespan starts.

    server_config: replaces keep_alive_s and max_body_bytes.
    """
    tokenizer = small_tokenizer()
    scripts: dict[str, list[int]] = {}
    limits = make_limits(
        max_streams=max_streams,
        max_context_tokens=max_context_tokens,
        max_chunk_tokens=64,
        page_tokens=16,
        vocab_size=tokenizer.num_ids,
        eos_token_ids=end_ids(),
    )
    grammars = small_grammars()
    engine = FakeEngine(
        limits,
        scripts=scripts,
        before_step=before_step,
        grammars=grammars,
        offload_report=offload_report,
    )

    def load(progress: Progress) -> Loaded:
        if before_load is not None:
            before_load(progress)
        engine.warm_up()
        model = ServedModel(
            MODEL,
            CREATED,
            tokenizer,
            max_context_tokens,
            defaults or SamplingParams(temperature=0.0),
            grammars=grammars,
        )
        return Loaded(engine, model)

    lifecycle = Lifecycle(
        load,
        SchedulerSettings(max_queue=max_queue),
        drain_timeout_s=drain_timeout_s,
        on_failure=on_failure,
    )
    config = server_config or ServerConfig(keep_alive_s=keep_alive_s, max_body_bytes=max_body_bytes)
    return Server(create_app(lifecycle, config, handles_signals=handles_signals), lifecycle, engine, scripts)


@contextlib.asynccontextmanager
async def serving(server: Server, *, wait: bool = True) -> AsyncIterator[Client]:
    """Run the application's lifespan; wait until the model is loaded."""
    async with server.app.router.lifespan_context(server.app):
        if wait:
            await server.lifecycle.wait_settled()
        yield Client(server)


@dataclass
class Answer:
    """A finished response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Parsed data of a stream's events, [DONE] as text."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """Split a stream; comments are left out."""
    blocks = body.decode().split("\n\n")
    assert blocks[-1] == "", "the stream ends inside an event"
    events: list[Any] = []
    for block in blocks[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@dataclass
class Exchange:
    """One request in progress. sent: ASGI messages of the application so far."""

    task: asyncio.Task[None]
    incoming: asyncio.Queue[Message]
    sent: list[Message] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")

    def disconnect(self) -> None:
        """The client leaves."""
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def wait_for(self, needle: bytes) -> None:
        """Wait until the response holds some bytes."""
        while needle not in self.body:
            assert not self.task.done(), self.body
            self.news.clear()
            await self.news.wait()

    async def answer(self) -> Answer:
        """Wait for the end of the response."""
        await self.task
        start = self.sent[0]
        assert start["type"] == "http.response.start"
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        assert [m.get("more_body", False) for m in self.sent[1:]][-1] is False
        return Answer(start["status"], headers, self.body)


class Client:
    """Speaks ASGI with the application."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def open(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        on_send: Callable[[Message], Any] | None = None,
        chunks: Sequence[bytes] | None = None,
    ) -> Exchange:
        """Start a request. on_send: an awaitable maker, called before a message counts as sent."""
        incoming: asyncio.Queue[Message] = asyncio.Queue()
        parts = [body] if chunks is None else list(chunks)
        for at, part in enumerate(parts):
            incoming.put_nowait({"type": "http.request", "body": part, "more_body": at + 1 < len(parts)})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }

        async def send(message: Message) -> None:
            if on_send is not None:
                await on_send(message)
            exchange.sent.append(message)
            exchange.news.set()

        async def run() -> None:
            try:
                await self.server.app(scope, incoming.get, send)
            finally:
                exchange.news.set()

        exchange = Exchange(asyncio.get_running_loop().create_task(run()), incoming)
        return exchange

    async def get(self, path: str) -> Answer:
        return await self.open("GET", path).answer()

    def open_chat(self, request_id: str = "r", **fields: Any) -> Exchange:
        """Start a chat completion; messages and model are filled in."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}
        return self.open(
            "POST", "/v1/chat/completions", json.dumps(body).encode(), {"x-request-id": request_id}
        )

    async def chat(self, request_id: str = "r", **fields: Any) -> Answer:
        return await self.open_chat(request_id, **fields).answer()


class LoadGate:
    """Holds loading on the engine thread until the test lets it go."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self.error: Exception | None = None

    def let_go(self) -> None:
        self._go.set()

    def __call__(self, progress: Progress) -> None:
        progress(0.42, "experts 61/144")
        if not self._go.wait(30):
            raise TimeoutError("loading was never let go")
        progress(0.9, "warming up")
        if self.error is not None:
            raise self.error
