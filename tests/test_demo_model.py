"""The demo model: where it is looked for, what takes it, and under which name it is served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm53srv.api.loading import DEMO_NAME
from glm53srv.api.served import ServedModel
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.config import describe, load_config
from glm53srv.demo_model import find_demo_model
from glm53srv.errors import ConfigError


def with_weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    return folder


def test_a_checkout_has_it_beside_the_package(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "reference" / "demo" / "checkpoint")
    assert find_demo_model(tmp_path / "glm53srv") == folder


def test_an_installed_package_has_it_inside(tmp_path: Path) -> None:
    with_weights(tmp_path / "reference" / "demo" / "checkpoint")
    folder = with_weights(tmp_path / "glm53srv" / "demo_checkpoint")
    assert find_demo_model(tmp_path / "glm53srv") == folder


def test_without_weights_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "reference" / "demo" / "checkpoint").mkdir(parents=True)
    assert find_demo_model(tmp_path / "glm53srv") is None


def test_a_default_model_is_taken_and_told() -> None:
    config = load_config([], {}, default_model=Path("demo"))
    assert config.engine.model_dir == Path("demo")
    assert describe(config) == ["model = demo (default)"]


@pytest.mark.parametrize(("argv", "environ"), [(["--model", "x"], {}), ([], {"GLM53_MODEL_DIR": "x"})])
def test_a_named_model_wins(argv: list[str], environ: dict[str, str]) -> None:
    assert load_config(argv, environ, default_model=Path("demo")).engine.model_dir == Path("x")


def test_without_a_default_a_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="no model"):
        load_config([], {})


def test_generate_takes_it_unasked_and_says_what_it_is(demo_model_dir: Path) -> None:
    assert find_demo_model() == demo_model_dir
    command = [sys.executable, "-m", "glm53srv", "generate", "What is the capital of France?"]
    done = subprocess.run(
        [*command, "--temperature", "0"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("\n\nThe capital of France is Paris.\n")
    assert f"{DEMO_NAME} is a small demo" in done.stderr


def test_a_model_to_be_taken_at_its_word_has_no_caveat(random_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(random_model_dir)
    assert ServedModel("x", 0, tokenizer, 512).caveat is None
    assert "random" in str(ServedModel("x", 0, tokenizer, 512, is_random=True).caveat)
    assert "closed world" in str(ServedModel("x", 0, tokenizer, 512, is_demo=True).caveat)
