"""Training weights from the shipped checkpoint: its logits are those that the CPU engine gives."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.engine.drive import EngineDriver

torch = pytest.importorskip("torch", reason="needs torch, as training does")

PROMPT = [7, 300, 41, 1200, 88, 9, 2071, 640, 33, 512, 77, 1024]


@pytest.fixture
def resume() -> ModuleType:
    return importlib.import_module("reference.demo.resume")


def make_model() -> Any:
    model = importlib.import_module("reference.demo.model")
    return model.DemoModel(importlib.import_module("reference.demo.shape").Shape())


def last_logits(model: Any, ids: list[int]) -> Any:
    """Give log probabilities behind the last token, as training computes them."""
    module = importlib.import_module("reference.demo.model")
    batch = torch.tensor([ids])
    run = module.Run(module.Functions(), module.make_packing(torch.zeros_like(batch)))
    with torch.no_grad():
        logits = model.logits(model.trunk(batch, run), run).float()
    return torch.log_softmax(logits, -1).numpy()[len(ids) - 1]


def test_the_model_speaks_as_the_checkpoint_does(resume: ModuleType, demo_model_dir: Path) -> None:
    assert resume.is_checkpoint(demo_model_dir)
    model = make_model()
    resume.load_checkpoint(model, demo_model_dir)
    trained = last_logits(model, PROMPT)
    engine = CpuEngine.load(demo_model_dir, EngineOptions(cache_tokens=512))
    try:
        told = EngineDriver(engine).open([PROMPT], num_top=20)[0][-1]
    finally:
        engine.close()
    ids_told, logprobs = zip(*told.top, strict=True)
    assert np.abs(trained[list(ids_told)] - np.array(logprobs)).max() < 5e-3


def test_weights_of_another_kind_are_no_checkpoint(resume: ModuleType, tmp_path: Path) -> None:
    assert not resume.is_checkpoint(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(resume: ModuleType, random_model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"has .* numbers, need|lacks"):
        resume.load_checkpoint(make_model(), random_model_dir)
