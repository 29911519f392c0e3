"""These tests need torch and triton, which `make test` does not install: `make test-triton` runs them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from glm53srv.machine import read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.offload.device.arena import ExpertArena

HAS_BOTH = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
collect_ignore_glob = [] if HAS_BOTH else ["test_*.py"]


@pytest.fixture(scope="session")
def config(random_model_dir: Path) -> ModelConfig:
    return load_model_config(random_model_dir)


@pytest.fixture(scope="session")
def arena(random_model_dir: Path, config: ModelConfig) -> ExpertArena:
    facts = read_machine()
    machine = replace(facts, available_bytes=facts.total_bytes, limit_bytes=None)
    return ExpertArena.load(Checkpoint(random_model_dir), config, machine)
