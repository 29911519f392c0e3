"""The table of endpoints. The application, /openapi.json and /docs are all made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute, Route

from glm53srv.api.docs_routes import DocsPage, OpenApi
from glm53srv.api.info_routes import (
    AbortRequest,
    FlushCache,
    HealthGenerate,
    Info,
    Loads,
    MetricsText,
    ModelInfo,
    ServerInfo,
    Stats,
    Version,
)
from glm53srv.api.openai import prepare_chat
from glm53srv.api.openai_completions import prepare_completion
from glm53srv.api.openapi import Operation
from glm53srv.api.routes import (
    ApiContext,
    Endpoint,
    GenerationEndpoint,
    Health,
    JsonEdge,
    Liveness,
    Models,
)
from glm53srv.api.sglang import prepare_generate
from glm53srv.api.text_routes import TextEndpoint, detokenize, tokenize
from glm53srv.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Row:
    """One endpoint and its paths. paths: the first is the one to use, the others are other servers' names."""

    methods: tuple[str, ...]
    paths: tuple[str, ...]
    endpoint: Endpoint
    operation: Operation


def starlette_routes(context: ApiContext, metrics: Metrics, info: ServerInfo) -> Sequence[BaseRoute]:
    """Give the application's routes."""
    rows = route_rows(context, metrics, info)
    operations = [
        (method, path, row.operation) for row in rows for path in row.paths for method in row.methods
    ]
    rows += [
        Row(("GET",), ("/openapi.json",), OpenApi(operations), Operation("This API as an OpenAPI document")),
        Row(("GET",), ("/docs",), DocsPage(operations), Operation("This list of endpoints as a page")),
    ]
    return [
        Route(path, JsonEdge(row.endpoint), methods=list(row.methods)) for row in rows for path in row.paths
    ]


def route_rows(context: ApiContext, metrics: Metrics, info: ServerInfo) -> list[Row]:
    """Give the table."""
    health, alive, models = Health(context.state), Liveness(), Models(context.state)
    chat = GenerationEndpoint(context, prepare_chat, "chatcmpl")
    completion = GenerationEndpoint(context, prepare_completion, "cmpl")
    generate = GenerationEndpoint(context, prepare_generate, "gen")
    text = TextEndpoint
    get, post = ("GET",), ("POST",)
    return [
        Row(
            post,
            ("/v1/chat/completions", "/chat/completions"),
            chat,
            Operation("Answer a chat", "ChatCompletionRequest", True),
        ),
        Row(
            post,
            ("/v1/completions",),
            completion,
            Operation("Go on from a raw prompt", "CompletionRequest", True),
        ),
        Row(get, ("/v1/models", "/models"), models, Operation("List the model")),
        Row(get, ("/v1/models/{model_id:path}",), models, Operation("Describe the model")),
        Row(
            ("POST", "PUT"),
            ("/generate",),
            generate,
            Operation("Go on from a raw prompt, SGLang's protocol", "GenerateRequest", True),
        ),
        Row(
            post,
            ("/tokenize", "/v1/tokenize"),
            text(context, tokenize),
            Operation("Encode text or messages", "TokenizeRequest"),
        ),
        Row(
            post,
            ("/detokenize", "/v1/detokenize"),
            text(context, detokenize),
            Operation("Decode token ids", "DetokenizeRequest"),
        ),
        Row(
            post,
            ("/abort_request",),
            AbortRequest(context),
            Operation("End a running request", "AbortRequest"),
        ),
        Row(("GET", "POST"), ("/flush_cache",), FlushCache(context), Operation("Drop cached prefixes")),
        Row(
            get, ("/health", "/health/ready", "/ready"), health, Operation("Whether requests would be taken")
        ),
        Row(get, ("/health/live", "/livez"), alive, Operation("Whether the process answers at all")),
        Row(get, ("/health_generate",), HealthGenerate(context), Operation("Whether a token comes out")),
        Row(get, ("/server_info", "/get_server_info"), Info(context, info), Operation("Options and limits")),
        Row(get, ("/model_info", "/get_model_info"), ModelInfo(context), Operation("The model's properties")),
        Row(get, ("/v1/loads",), Loads(context), Operation("How busy the engine is")),
        Row(get, ("/stats",), Stats(context, info), Operation("The scheduler's numbers now")),
        Row(
            get, ("/metrics",), MetricsText(metrics), Operation("Metrics for Prometheus", answer="text/plain")
        ),
        Row(get, ("/version",), Version(), Operation("The server's version")),
    ]
