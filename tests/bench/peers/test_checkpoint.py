"""A checkpoint of drawn weights, small, as every reader of one finds it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch, as make test-triton installs it")

import torch

from bench.peers.checkpoint import disk_bytes, read_marker, write_model
from bench.peers.shards import plan_shards
from glm53srv.engine.base import PrefillSlice, SequenceStart, StepPlan
from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.engine.cuda.synthetic import SyntheticTensors, fill_arena
from glm53srv.engine.cuda.synthetic_plan import tensor_specs
from glm53srv.machine import read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.model.tensor_needs import all_needs
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.request import SamplingParams

MAX_BYTES = 1_000_000
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "I16": np.uint16, "I32": np.uint32}


@pytest.fixture(scope="module")
def target(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint at the random model's dimensions; those of the published one take 5 GB at least."""
    target = tmp_path_factory.mktemp("drawn")
    for name in ("config.json", "generation_config.json", "processor_config.json", "tokenizer_config.json"):
        shutil.copy(random_model_dir / name, target)
    config = load_model_config(target)
    write_model(target, plan_shards(config, MAX_BYTES), "cpu", 3)
    return target


@pytest.fixture(scope="module")
def config(target: Path) -> ModelConfig:
    return load_model_config(target)


@pytest.fixture(scope="module")
def arena(config: ModelConfig) -> ExpertArena:
    return fill_arena(config, ArenaOptions(), 2)


def test_all_that_the_model_needs_is_there_and_nothing_else(target: Path, config: ModelConfig) -> None:
    checkpoint = Checkpoint(target)
    checkpoint.check(all_needs(config))
    assert set(checkpoint.names()) == {name for name, _ in tensor_specs(config)}
    assert count_token_ids(target, config.vocab_size) == config.vocab_size


def test_the_marker_comes_with_the_finished_files(target: Path, config: ModelConfig) -> None:
    drawn = read_marker(target)
    files = list(target.glob("*.safetensors"))
    assert drawn is not None
    assert (drawn.layers, drawn.device) == (config.num_layers, "cpu")
    assert drawn.num_bytes == sum(file.stat().st_size for file in files)
    assert drawn.num_bytes == disk_bytes(plan_shards(config, MAX_BYTES))
    assert len(files) > 3


def test_the_numbers_are_those_that_bench_model_draws(
    target: Path, config: ModelConfig, arena: ExpertArena
) -> None:
    checkpoint, tensors = Checkpoint(target), SyntheticTensors(config, arena, torch.device("cpu"))
    for name, spec in tensor_specs(config):
        if ".mlp.experts." in name and spec.kind == "trellis":
            continue  # those of the arena: see below
        made = tensors.get_tensor(name, allow_bf16=True)
        assert made is not None
        info = checkpoint.info(name)
        bits = BITS[info.dtype]
        stored = np.ascontiguousarray(checkpoint.raw(name, spec.shape, (info.dtype,))).reshape(-1).view(bits)
        expected = made.reshape(-1).view(torch.uint8).numpy().view(bits)
        assert np.array_equal(stored, expected), name


def test_an_arena_of_the_files_is_the_arena_that_was_drawn(
    target: Path, config: ModelConfig, arena: ExpertArena
) -> None:
    facts = read_machine()
    machine = replace(facts, available_bytes=facts.total_bytes, limit_bytes=None)
    loaded = ExpertArena.load(Checkpoint(target), config, machine)
    assert np.array_equal(loaded.records, arena.records)
    assert np.array_equal(loaded.scales, arena.scales)


def test_the_cpu_engine_runs_it(target: Path) -> None:
    engine = CpuEngine.load(target, EngineOptions(cache_tokens=1024, max_chunk_tokens=64))
    ids, limits = tuple(range(5, 45)), engine.limits
    start = SequenceStart("a", SamplingParams(temperature=0.0, ignore_eos=True), 0, ids)
    pages = tuple(range(limits.num_pages // limits.max_streams))
    piece = PrefillSlice(0, ids, 0, pages, 0, limits.num_layers, True, start)
    try:
        result = engine.step(StepPlan(1, prefill=piece))
    finally:
        engine.close()
    assert 0 <= result.tokens[0].token_id < limits.vocab_size
    assert result.tokens[0].error is None
