"""Fixtures shared by the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53srv.model.pack import pack_random_model

SHARED = Path(__file__).resolve().parents[2] / "shared"


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
