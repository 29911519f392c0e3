"""The random model's experts in an arena, filled once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from glm53srv.machine import MachineFacts, read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.offload.device.arena import ExpertArena


@dataclass(frozen=True)
class Model:
    """A checkpoint with its configuration."""

    checkpoint: Checkpoint
    config: ModelConfig


@pytest.fixture(scope="session")
def model(random_model_dir: Path) -> Model:
    return Model(Checkpoint(random_model_dir), load_model_config(random_model_dir))


@pytest.fixture(scope="session")
def machine() -> MachineFacts:
    """Give this machine, as if no one else used its memory."""
    facts = read_machine()
    return replace(facts, available_bytes=facts.total_bytes, limit_bytes=None)


@pytest.fixture(scope="session")
def arena(model: Model, machine: MachineFacts) -> ExpertArena:
    return ExpertArena.load(model.checkpoint, model.config, machine)
