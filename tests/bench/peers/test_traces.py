"""The picks of both peers."""

from __future__ import annotations

import numpy as np
import pytest

from bench.peers.traces import TRACE_TOKENS, Trace, draw_traces, renumber, whole_routes
from glm53srv.bench_model.routes import generate
from glm53srv.model.config import ModelConfig
from glm53srv.model.published_files import published_model


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return published_model(5)


@pytest.fixture(scope="module")
def traces(config: ModelConfig) -> list[Trace]:
    return draw_traces(config, whole_routes(config), 2)


def test_a_shortened_model_has_the_first_layers_of_the_whole_ones_traces(traces: list[Trace]) -> None:
    assert traces[0].shape == (TRACE_TOKENS, 2, 8)
    assert np.array_equal(traces[1], generate(TRACE_TOKENS, seed=1)[:, :2])


def test_streams_differ(traces: list[Trace]) -> None:
    assert not np.array_equal(traces[0], traces[1])


def test_experts_are_found_at_their_places(traces: list[Trace]) -> None:
    rng = np.random.default_rng(5)
    orders = [rng.permutation(288).tolist() for _ in range(2)]
    places = renumber(traces[0], orders)
    for layer, order in enumerate(orders):
        assert np.array_equal(np.asarray(order)[places[:, layer]], traces[0][:, layer])
    assert not np.array_equal(places, traces[0])
