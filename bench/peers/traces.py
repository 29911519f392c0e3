"""The experts that both peers' decode steps pick: traces of the published skew and locality.

Random weights' routers know popularity at best, and a cache lives on what neighbouring tokens share; see
bench_model/routes.py. A shortened model has the traces of the layers it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glm53srv.bench_model.routes import RouteModel, generate, route_model
from glm53srv.model.config import ModelConfig
from glm53srv.model.published import PUBLISHED
from glm53srv.offload.device.layout import sparse_layers

TRACE_TOKENS = 512
"""Tokens of a stream until its routes come round again: more than all steps of the defaults."""

Trace = NDArray[np.int64]


def whole_routes(config: ModelConfig) -> RouteModel:
    """Draw the popularity of the experts of all layers of the whole model."""
    return route_model(len(sparse_layers(PUBLISHED)), config.moe.num_experts, config.moe.top_k)


def draw_traces(config: ModelConfig, model: RouteModel, num_streams: int) -> list[Trace]:
    """Draw a trace for each stream: int64 (TRACE_TOKENS, sparse layers, top_k), expert ids."""
    num_layers = len(sparse_layers(config))
    return [
        generate(TRACE_TOKENS, seed=stream, model=model, top_k=config.moe.top_k)[:, :num_layers].astype(
            np.int64
        )
        for stream in range(num_streams)
    ]


def renumber(trace: Trace, orders: Sequence[Sequence[int]]) -> Trace:
    """Name the experts of a trace by their places: orders[layer][place] is the expert at a place."""
    found = np.empty_like(trace)
    for layer, order in enumerate(orders):
        places = np.empty(len(order), np.int64)
        places[np.asarray(order)] = np.arange(len(order))
        found[:, layer] = places[trace[:, layer]]
    return found
