"""The server on random weights: routes go before decode steps, the tokenizer decides what is drawn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cuda.serve_random import RoutedEngine, main, random_loader, read_command_line
from bench.errors import BadInput
from glm53srv.api.app import create_app
from glm53srv.api.lifecycle import Lifecycle
from glm53srv.config import load_config
from glm53srv.engine.base import DecodeRow, PrefillSlice, SequenceStart, StepPlan
from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.errors import ConfigError
from glm53srv.model.config import load_model_config
from glm53srv.request import SamplingParams
from tests.api.harness import Server, serving

OPTIONS = EngineOptions(max_streams=2, cache_tokens=512, num_threads=1)
ASKED: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 3, "stream": True}


class Recorder:
    """Routes that note what they are told, and how many steps were done by then."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[int]]] = []
        self.num_done = 0

    def send(self, streams: Any) -> None:
        self.sent.append((self.num_done, list(streams)))

    def behind(self) -> None:
        self.num_done += 1


def test_routes_are_sent_before_each_decode_step_and_no_other(random_model_dir: Path) -> None:
    routes = Recorder()
    engine = CpuEngine.load(random_model_dir, OPTIONS)
    routed = RoutedEngine(engine, engine.limits, routes, routes.behind)
    routed.warm_up()
    greedy = SequenceStart("a", SamplingParams(temperature=0.0), 0, (5, 6, 7))
    depth = routed.limits.num_layers
    result = routed.step(StepPlan(1, prefill=PrefillSlice(1, (5, 6, 7), 0, (0,), 0, depth, True, greedy)))
    routed.step(StepPlan(2, decode=(DecodeRow(1, result.tokens[0].token_id, 3, (0,)),)))
    routed.step(StepPlan(3, release=(1,)))
    routed.close()
    assert routes.sent == [(1, [1])]
    assert routes.num_done == 3


def test_an_engine_is_served_with_the_ids_of_the_tokenizer(random_model_dir: Path) -> None:
    """The drawn model's head is wider than the tokenizer, as with the published one and the demo's."""
    config = load_config(["--model", str(random_model_dir)], environ={})
    routes, drawn = Recorder(), []

    def build(make_sampler: Any) -> Any:
        described = load_model_config(random_model_dir)
        wide = replace(described, vocab_size=2 * described.vocab_size)
        bank = make_sampler(wide)
        bank.start(0, SequenceStart("a", SamplingParams(temperature=0.0), 0, ()))
        rising = np.arange(wide.vocab_size, dtype=np.float32)[None]
        drawn.append(bank.sample([0], rising)[0].token_id)
        return CpuEngine.load(random_model_dir, OPTIONS), routes, routes.behind

    async def run() -> Any:
        lifecycle = Lifecycle(random_loader(config, build))
        app = create_app(lifecycle)
        async with serving(Server(app, lifecycle, None, {})) as client:  # type: ignore[arg-type]
            assert lifecycle.failure is None
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            answer = await client.chat(**ASKED, model=model)
            return model, answer, lifecycle.state.running

    model, answer, running = asyncio.run(run())
    assert model == "random-weights"
    assert running.model.is_random
    num_ids = running.model.tokenizer.num_ids
    assert drawn[0] < num_ids
    limits, described = running.steps.limits, load_model_config(random_model_dir)
    assert (limits.vocab_size, limits.eos_token_ids) == (num_ids, described.eos_token_ids)
    assert answer.status == 200
    assert answer.events()[-1] == "[DONE]"
    assert sum("choices" in event for event in answer.events()[:-1]) > 3
    assert len(routes.sent) == ASKED["max_tokens"] - 1, "the first token is the prompt's"


def test_options_of_server_and_engine_are_told_apart(random_model_dir: Path) -> None:
    words = ["--tokenizer", str(random_model_dir), "--port", "31234", "--mode", "exact", "--layers", "6"]
    config, options = read_command_line(words)
    assert (config.server.port, config.engine.mode, config.engine.model_dir) == (
        31234,
        "exact",
        random_model_dir,
    )
    assert (options.layers, options.mode) == (6, "exact")


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="no such directory"):
        read_command_line(["--tokenizer", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="unrecognized"):
        read_command_line(["--tokenizer", str(tmp_path), "--speed", "9"])
    assert main(["--tokenizer", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
