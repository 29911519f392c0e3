"""The endpoints. Each is a small ASGI application; what they say is spelled by the protocol modules."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from glm53srv.api import openai_wire
from glm53srv.api.asgi import (
    REQUEST_ID,
    ClientGone,
    DisconnectWatch,
    error_headers,
    read_body,
    send_json,
)
from glm53srv.api.constraints import check_output_format
from glm53srv.api.generations import Deadlines, Generations, open_generations
from glm53srv.api.protocol import AnswerHead, Prepare, PreparedRequest, StreamWriter
from glm53srv.api.served import ServedModel
from glm53srv.api.service import Finish
from glm53srv.api.sse import EventStream, StreamTimes
from glm53srv.api.state import Running, ServerState
from glm53srv.errors import RequestError, RequestFailed

logger = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

LONG_BODY_BYTES = 1024
"""Bodies beyond this are parsed, rendered and encoded in a thread.

At this size that takes 0.3 ms, at twice the size 0.6 ms (GLM's tokenizer, prose, 2.4 GHz Zen 3, least of 30).
"""

MAX_TOLD_NAMES = 64

PROBES = ("/health", "/livez", "/ready", "/metrics")
"""Paths that machines ask every few seconds: no line at INFO unless the answer is a failure."""

LOG_FIELDS = "glm53srv.log_fields"
"""Scope key of a dict that a handler fills for the line its request gets in the log."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What endpoints share. text_threads: runs the preparation of long prompts."""

    state: ServerState
    text_threads: Executor
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float | None = None
    times: StreamTimes = field(default_factory=StreamTimes)
    deadlines: Deadlines = field(default_factory=Deadlines)
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic

    async def call(
        self, num_bytes: int, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Call work(*arguments), which reads num_bytes of body, on a text thread if that takes long."""
        if num_bytes <= LONG_BODY_BYTES:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work, *arguments)


Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class JsonEdge:
    """The edge of a request: every error becomes an answer in the shape of the endpoint's protocol."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._endpoint(scope, receive, send)
        except ClientGone:
            scope[LOG_FIELDS]["finish"] = "disconnect"
        except RequestError as error:
            await send_error(send, error)
        except Exception as error:  # the request edge: answer, log, go on serving
            logger.exception("request failed id=%s error=%r", scope[REQUEST_ID], error)
            await send_error(send, RequestFailed(f"Internal error, request id {scope[REQUEST_ID]}"))


async def send_error(send: Send, error: RequestError) -> None:
    """Answer with an OpenAI error object."""
    await send_json(send, error.status, openai_wire.error_body(error), error_headers(error))


class Health:
    """GET /health, /health/ready: whether requests would be taken."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body, retry_after_s = self._state.health()
        headers = [] if retry_after_s is None else [(b"retry-after", b"%d" % retry_after_s)]
        await send_json(send, status, body, headers)


class Liveness:
    """GET /livez, /health/live: whether the event loop turns; true while the model loads."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"status": "alive"})


class Models:
    """GET /v1/models and /v1/models/{model_id}."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._state.require_running().model
        model_id = scope.get("path_params", {}).get("model_id")
        if model_id is None:
            await send_json(send, 200, {"object": "list", "data": [openai_wire.model_body(model)]})
            return
        openai_wire.check_model(model_id, model)
        await send_json(send, 200, openai_wire.model_body(model))


class GenerationEndpoint:
    """An endpoint that generates, in any protocol.

    prepare: the protocol's translation of a body. id_prefix: of the answers' ids.
    """

    def __init__(self, context: ApiContext, prepare: Prepare, id_prefix: str) -> None:
        self._context = context
        self._prepare_body = prepare
        self._id_prefix = id_prefix
        self._told: set[str] = set()  # template arguments that were logged as unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._context.max_body_bytes, self._context.body_timeout_s)
        running = self._context.state.require_running()
        job: PreparedRequest | None = None
        async with DisconnectWatch(receive) as watch:
            job = await self._prepare(body, running.model, scope[REQUEST_ID])
            if not job.is_stream:
                answer = await self._answer(scope, running, job)
                watch.expect_end()
                await send_json(send, 200, answer)
        if watch.is_gone or job is None:
            raise ClientGone
        if job.is_stream:
            await self._stream(scope, receive, send, running, job)

    async def _prepare(self, body: bytearray, model: ServedModel, request_id: str) -> PreparedRequest:
        job = await self._context.call(len(body), self._prepare_body, body, model, request_id)
        for wanted in job.output_formats:  # compiling may take up to a second
            loop, threads = asyncio.get_running_loop(), self._context.text_threads
            await loop.run_in_executor(threads, check_output_format, wanted, model.grammars)
        self._tell_ignored(job.ignored)
        return job

    def _tell_ignored(self, names: Sequence[str]) -> None:
        """Log a template argument that nobody reads: each once, and not endlessly many names."""
        for name in names:
            if name not in self._told and len(self._told) < MAX_TOLD_NAMES:
                self._told.add(name)
                logger.warning("chat_template_kwargs has %.80r, which nothing reads", name)

    def _open(self, running: Running, job: PreparedRequest) -> Generations:
        return open_generations(
            running.steps,
            job.jobs,
            running.model.tokenizer,
            clock=self._context.clock,
            deadlines=self._context.deadlines,
        )

    async def _answer(self, scope: Scope, running: Running, job: PreparedRequest) -> object:
        """Generate everything. Runs inside a DisconnectWatch."""
        generations = self._open(running, job)
        builder = job.new_builder(self._head(), running.model)
        try:
            while outputs := await generations.next_steps():
                for output in outputs:
                    builder.add(output)
                    _note_finish(scope, output.finish)
        finally:
            generations.close()
            _note_generations(scope, generations)
        return builder.body(generations.usage)

    async def _stream(
        self, scope: Scope, receive: Receive, send: Send, running: Running, job: PreparedRequest
    ) -> None:
        generations = self._open(running, job)
        source = GenerationFrames(generations, job.new_writer(self._head(), running.model), scope)
        try:
            stream = EventStream(source, self._context.times)
            if not await stream(scope, receive, send):
                scope[LOG_FIELDS]["finish"] = "slow_reader" if stream.is_stuck else "disconnect"
        finally:
            generations.close()
            _note_generations(scope, generations)

    def _head(self) -> AnswerHead:
        return AnswerHead(f"{self._id_prefix}-{uuid.uuid4().hex}", int(self._context.wall_clock()))


class GenerationFrames:
    """A stream's frames (sse.FrameSource): the opening, then one frame per step, then the closing."""

    def __init__(self, generations: Generations, writer: StreamWriter, scope: Scope) -> None:
        self._generations = generations
        self._writer = writer
        self._scope = scope
        self._is_opened = False
        self._is_closed = False

    async def next_frame(self) -> bytes | None:
        if not self._is_opened:
            self._is_opened = True
            return self._writer.opening(self._generations.usage)
        outputs = await self._generations.next_steps()
        usage = self._generations.usage
        if outputs:
            for output in outputs:
                _note_finish(self._scope, output.finish)
            return b"".join(self._writer.step(output, usage) for output in outputs)
        if self._is_closed:
            return None
        self._is_closed = True
        return self._writer.closing(usage)

    def error_frame(self, error: RequestError) -> bytes:
        self._scope[LOG_FIELDS]["finish"] = "error"
        return self._writer.error(error)

    def close(self) -> None:
        self._generations.close()


class RequestLog:
    """Wraps the application: a request id in and out, one line in the log at the end. Never prompt text."""

    def __init__(self, app: ASGIApp, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope[REQUEST_ID] = request_id
        fields: dict[str, Any] = {}
        scope[LOG_FIELDS] = fields
        begin_s = self._clock()
        status = 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            is_probe = scope["path"].startswith(PROBES) and status in (200, 503)
            logger.log(
                logging.DEBUG if is_probe else logging.INFO,
                "request id=%s method=%s path=%r status=%s duration_s=%.3f%s",
                request_id,
                scope["method"],
                scope["path"],
                status or "-",
                self._clock() - begin_s,
                "".join(f" {name}={value}" for name, value in fields.items()),
            )


def _request_id(scope: Scope) -> str:
    """Take the client's x-request-id if it is one that may stand in a header and a log, else make one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    if 0 < len(given) <= 128 and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode()
    return f"req_{uuid.uuid4().hex}"


def _note_finish(scope: Scope, finish: Finish | None) -> None:
    if finish is not None:
        fields = scope[LOG_FIELDS]
        fields["finish"] = f"{fields['finish']},{finish.reason}" if "finish" in fields else finish.reason


def _note_generations(scope: Scope, generations: Generations) -> None:
    usage = generations.usage
    fields = scope[LOG_FIELDS]
    fields["prompt_tokens"] = usage.prompt_tokens
    fields["completion_tokens"] = usage.completion_tokens
    fields["cached_tokens"] = usage.cached_tokens
    if generations.first_token_s is not None:
        fields["first_token_s"] = f"{generations.first_token_s - generations.submitted_s:.3f}"
