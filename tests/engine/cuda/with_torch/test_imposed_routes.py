"""Prescribed picks: each row its stream's, in turn, whatever the router said; weights stay the router's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from glm53srv.engine.cuda.imposed_routes import ImposedRoutes
from glm53srv.engine.cuda.moe import adopt_sparse_layers
from tests.engine.cuda.with_torch.test_moe import Block, Model, Stock

LAYERS, TOP_K = 3, 2


class Router(Stock):
    """A sparse layer whose router picks 90 and 91 for every row."""

    def route(self, rows: int, config: Any, z: Any, params: dict[str, Any]) -> Any:
        return torch.tensor([[90, 91]] * rows), torch.full((rows, TOP_K), 0.5)


def trace(stream: int, num_tokens: int) -> np.ndarray:
    """Number experts by stream, token and layer."""
    numbers = np.arange(num_tokens * LAYERS * TOP_K).reshape(num_tokens, LAYERS, TOP_K)
    return (numbers + 1000 * stream).astype(np.uint16)


def picks_of(layers: list[Any], rows: int) -> np.ndarray:
    found = []
    for layer in layers:
        picks, weights = layer.routing_fn(rows, "config", "z", {})
        assert torch.equal(weights, torch.full((rows, TOP_K), 0.5))
        found.append(picks.numpy())
    return np.stack(found)


def test_guesses_are_sent_with_the_picks_of_their_step() -> None:
    layers = adopt_sparse_layers(Model([Block(Router(str(i), [])) for i in range(LAYERS)]), Stock)
    traces, guesses = [trace(0, 5), trace(1, 2)], [trace(2, 5), trace(3, 2)]
    routes = ImposedRoutes(traces, 2, "cpu", guesses)
    routes.impose(layers)
    place = routes.guesses_of_step.data_ptr()
    for step in range(3):
        routes.send([1, 0])
        for row, stream in ((0, 1), (1, 0)):
            token = step % len(traces[stream])
            np.testing.assert_array_equal(picks_of(layers, 2)[:, row], traces[stream][token])
            np.testing.assert_array_equal(routes.guesses_of_step[:, row].numpy(), guesses[stream][token])
    assert routes.guesses_of_step.data_ptr() == place  # captured steps read it there


@pytest.mark.parametrize("is_ahead", [False, True])
def test_rows_pick_what_their_streams_traces_say(is_ahead: bool) -> None:
    layers = adopt_sparse_layers(Model([Block(Router(str(i), [])) for i in range(LAYERS)]), Stock)
    traces = [trace(0, 5), trace(1, 2)]
    routes = ImposedRoutes(traces, 2, "cpu")
    routes.impose(layers)
    np.testing.assert_array_equal(picks_of(layers, 2), np.broadcast_to([0, 1], (LAYERS, 2, TOP_K)))
    places = [0, 0]
    if is_ahead:
        routes.send_ahead()  # behind a step of the warm-up, which has no streams
    for streams in ([0], [1, 0], [0, 1], [0, 1], [0, 1], [1], [0, 1]):  # both come round again
        routes.send(streams)
        found = picks_of(layers, len(streams))
        for row, stream in enumerate(streams):
            expected = traces[stream][places[stream] % len(traces[stream])]
            np.testing.assert_array_equal(found[:, row], expected)
            places[stream] += 1
        if is_ahead:
            routes.send_ahead()
    long = picks_of(layers, 3)  # a prompt: the routers' own
    np.testing.assert_array_equal(long, np.broadcast_to([90, 91], (LAYERS, 3, TOP_K)))
