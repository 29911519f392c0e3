"""What the server says about itself, and the few things an operator may tell it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from glm53srv import __version__
from glm53srv.api.asgi import ClientGone, DisconnectWatch, read_body, send_json
from glm53srv.api.generations import open_generations
from glm53srv.api.plain_reader import PlainReader
from glm53srv.api.routes import ApiContext
from glm53srv.api.service import GenerationJob
from glm53srv.api.wire import Fields, parse_body
from glm53srv.config import Config
from glm53srv.errors import RequestFailed
from glm53srv.metrics import CONTENT_TYPE, Metrics
from glm53srv.request import GenerationRequest, SamplingParams
from glm53srv.scheduler.stats import SchedulerStats

SHOWN_SERVER_OPTIONS = (
    "host",
    "port",
    "served_name",
    "max_body_bytes",
    "drain_timeout_s",
    "keep_alive_s",
    "log_level",
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What does not change while the server runs. options: its configuration, without secrets.

    started_s: Unix seconds.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    launch_command: str = ""
    started_s: float = 0.0


def describe_server(config: Config, *, wall_clock: Callable[[], float] = time.time) -> ServerInfo:
    """Name the options by what is known to hold no secret: a new one does not show by itself."""
    options = {name: _plain(value) for name, value in asdict(config.engine).items()}
    options |= {name: _plain(value) for name, value in asdict(config.scheduler).items()}
    options |= {name: getattr(config.server, name) for name in SHOWN_SERVER_OPTIONS}
    command = shlex.join(["glm53srv", "serve", "--model", str(config.engine.model_dir)])
    return ServerInfo(options, command, wall_clock())


def _plain(value: object) -> object:
    """Spell what JSON has no type for as text, also inside a group of options."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


class Version:
    """GET /version."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"version": __version__})


class MetricsText:
    """GET /metrics, for Prometheus; also while the model loads."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, CONTENT_TYPE.encode(), self._metrics.exposition())


class Stats:
    """GET /stats: the scheduler now. offload: counters of the expert cache, null where there is none."""

    def __init__(self, context: ApiContext, info: ServerInfo) -> None:
        self._context = context
        self._info = info

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._context.state
        uptime_s = self._context.wall_clock() - self._info.started_s
        body: dict[str, Any] = {"status": state.phase.value, "uptime_s": round(uptime_s, 3)}
        if state.running is not None:
            steps = state.running.steps
            offload = steps.offload_report
            body |= {
                "model": state.running.model.name,
                "step_loop": steps.state.value,
                "scheduler": asdict(steps.stats()),
                "limits": asdict(steps.limits),
                "prefix_cache": None,
                "offload": None if offload is None else asdict(offload),
            }
        await send_json(send, 200, body)


class Info:
    """GET /server_info: every option, and the limits that follow from them, under SGLang's names too."""

    def __init__(self, context: ApiContext, info: ServerInfo) -> None:
        self._context = context
        self._info = info

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = self._context.state.require_running()
        model, limits, stats = running.model, running.steps.limits, running.steps.stats()
        body = {
            **self._info.options,
            "model_path": model.path,
            "tokenizer_path": model.path,
            "served_model_name": model.name,
            "context_length": model.context_tokens,
            "max_running_requests": limits.max_streams,
            "chunked_prefill_size": limits.max_chunk_tokens,
            "page_size": limits.page_tokens,
            "max_total_num_tokens": limits.num_pages * limits.page_tokens,
            "max_req_input_len": model.context_tokens - 1,
            "launch_command": self._info.launch_command,
            "startup_time": self._info.started_s,
            "version": __version__,
            "internal_states": [load_body(stats, limits.page_tokens)],
        }
        await send_json(send, 200, body)


class ModelInfo:
    """GET /model_info, as SGLang's clients read it."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._context.state.require_running().model
        body = {
            "model_path": model.path,
            "served_model_name": model.name,
            "tokenizer_path": model.path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "exl3",
            "reasoning_parser": "glm45",
            "tool_call_parser": "glm47",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.model_type,
            "architectures": list(model.architectures),
            "max_model_len": model.context_tokens,
            "is_random": model.is_random,
            "is_demo": model.is_demo,
        }
        await send_json(send, 200, body)


class Loads:
    """GET /v1/loads: how busy the one engine is, in the shape of SGLang's load balancers."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        steps = self._context.state.require_running().steps
        load = {"dp_rank": 0, **load_body(steps.stats(), steps.limits.page_tokens)}
        body = {
            "timestamp": self._context.wall_clock(),
            "version": __version__,
            "dp_rank_count": 1,
            "loads": [load],
        }
        await send_json(send, 200, body)


def load_body(stats: SchedulerStats, page_tokens: int) -> dict[str, Any]:
    """Spell a snapshot under SGLang's names."""
    return {
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": stats.num_pages_used * page_tokens,
        "max_total_num_tokens": stats.num_pages * page_tokens,
        "token_usage": stats.num_pages_used / stats.num_pages,
        "gen_throughput": stats.output_tokens_per_s,
        "last_gen_throughput": stats.output_tokens_per_s,
        "max_running_requests": stats.max_streams,
    }


class FlushCache:
    """GET or POST /flush_cache: drop what is kept between requests. There is no prefix cache to drop yet."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._context.state.require_running()
        await send_json(send, 200, {"success": True, "message": "Nothing is cached between requests."})


class AbortRequest:
    """POST /abort_request: end the outputs of a request by its id, `{"rid": ...}`, or all."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._context.max_body_bytes)
        steps = self._context.state.require_running().steps
        rid, wants_all = parse_abort(body)
        num_aborted = steps.cancel(None if wants_all else rid)
        await send_json(send, 200, {"success": True, "num_aborted": num_aborted})


def parse_abort(body: bytearray) -> tuple[str | None, bool]:
    """Read the body of /abort_request. Raises InvalidRequest."""
    fields = Fields(parse_body(body))
    rid, wants_all = fields.string("rid"), fields.boolean("abort_all", False)
    if not rid and not wants_all:
        raise fields.error("rid", "or abort_all must be given")
    return rid, wants_all


class HealthGenerate:
    """GET /health_generate: whether a token comes out. It waits its turn like any request."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = self._context.state.require_running()
        prompt_ids = running.model.tokenizer.encode_with_controls("<|user|>")
        request = GenerationRequest(
            request_id="HEALTH_CHECK",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
        )
        begin_s = self._context.clock()
        async with DisconnectWatch(receive) as watch:
            generations = open_generations(
                running.steps,
                [GenerationJob(request, PlainReader)],
                running.model.tokenizer,
                clock=self._context.clock,
            )
            try:
                while await generations.next_steps():
                    pass
            finally:
                generations.close()
            if generations.usage.completion_tokens != 1:
                raise RequestFailed("the engine gave no token")
            watch.expect_end()
            latency_s = round(self._context.clock() - begin_s, 3)
            await send_json(send, 200, {"status": "ready", "latency_s": latency_s})
        if watch.is_gone:
            raise ClientGone


async def send_bytes(send: Send, content_type: bytes, data: bytes) -> None:
    """Send a whole answer that is no JSON."""
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})
