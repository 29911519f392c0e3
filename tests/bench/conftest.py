"""A server of the random model, and the panel that its own engine makes, once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def server(random_model_dir: Path) -> Iterator[str]:
    """Give the address of a server of the random model."""
    with ServerProcess(random_model_dir) as process:
        yield process.url_when_ready()


@pytest.fixture(scope="session")
def panel_path(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a panel of the random model, its chats continued by 12 tokens each."""
    path = tmp_path_factory.mktemp("panels") / "panel.json"
    command = ["panel", "make", "--model", str(random_model_dir), "--out", str(path)]
    assert main([*command, "--answer-tokens", "12"]) == 0
    return path
