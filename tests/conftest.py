"""Fixtures shared by the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53srv.model.pack import pack_random_model

SHARED = Path(__file__).resolve().parents[2] / "shared"
REFERENCE = Path(__file__).resolve().parents[1] / "reference"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Give the folder of facts, oracles and fixtures beside the checkout; a test is skipped without it."""
    if not (SHARED / "README.md").is_file():
        pytest.skip(f"needs the shared fixtures at {SHARED}, which a user's checkout does not have")
    return SHARED


@pytest.fixture(scope="session")
def random_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the random model that `make serve` starts with, packed once per run."""
    model_dir = tmp_path_factory.mktemp("models") / "random"
    pack_random_model(model_dir)
    return model_dir


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Give the demo model of this checkout; a test is skipped while its weights are not there."""
    return _demo_file("demo/checkpoint/model.safetensors").parent


@pytest.fixture(scope="session")
def demo_panel_path() -> Path:
    """Give stock exllamav3's panel of the demo model."""
    return _demo_file("demo-exl3-ref-panel.json")


@pytest.fixture(scope="session")
def demo_greedy_path() -> Path:
    """Give what stock exllamav3 answers greedily to 50 prompts of the demo model."""
    return _demo_file("demo-exl3-greedy.json")


def _demo_file(name: str) -> Path:
    path = REFERENCE / name
    if not path.is_file():
        pytest.skip(f"needs {path}: made on a GPU, see reference/demo/README.md")
    return path
