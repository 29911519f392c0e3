"""Fixtures of the API tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from glm53srv.api.tokenizer import Tokenizer
from tests.api import builders


@pytest.fixture(scope="session")
def glm_dir(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with GLM's own tokenizer.json, unpacked."""
    folder = tmp_path_factory.mktemp("glm")
    packed = shared_dir / "fixtures" / "glm" / "tokenizer.json.gz"
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="session")
def glm_tokenizer(glm_dir: Path) -> Tokenizer:
    """GLM's own tokenizer."""
    return Tokenizer.load(glm_dir)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tiny tokenizer of the same kind, for tests that run everywhere."""
    return builders.small_tokenizer()


@pytest.fixture(scope="session")
def template_goldens(shared_dir: Path) -> dict[str, Any]:
    """Golden prompts of the upstream template."""
    text = (shared_dir / "fixtures" / "glm" / "template_goldens.json").read_text(encoding="utf-8")
    goldens: dict[str, Any] = json.loads(text)
    return goldens
