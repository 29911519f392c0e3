"""Putting a conversion in place: what is checked, what is written, and that a refusal writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from glm53srv.errors import CheckpointError
from glm53srv.model.config import load_model_config
from reference.demo.install_result import FIXED, GREEDY, PANEL, install
from reference.demo.panel_chats import panel_conversation
from reference.demo.rendering import load_template, render_training_text
from tests.model.checkpoints import copy_model, edit_header, edit_json


@pytest.fixture
def source(random_model_dir: Path, tmp_path: Path) -> Path:
    """Give a directory as the converter leaves it: indented, unmarked, with a template."""
    model_dir = copy_model(random_model_dir, tmp_path / "converted")
    edit_json(model_dir / "config.json", lambda content: content.pop("glm53srv"))
    storage = json.loads((model_dir / "quantization_config.json").read_bytes())
    (model_dir / "quantization_config.json").write_text(json.dumps(storage, indent=4))
    (model_dir / "chat_template.jinja").write_text("[gMASK]<sop>")
    return model_dir


@pytest.fixture
def target(source: Path, tmp_path: Path) -> Path:
    """Give the place for it: only what training started from is there."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in FIXED:
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def test_a_conversion_is_marked_made_smaller_and_copied(source: Path, target: Path) -> None:
    num_bytes = install(source, target)

    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}
    assert num_bytes == sum(path.stat().st_size for path in target.iterdir())
    assert load_model_config(target).is_demo
    assert not load_model_config(source).is_demo
    assert (target / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    written, given = target / "quantization_config.json", source / "quantization_config.json"
    assert json.loads(written.read_bytes()) == json.loads(given.read_bytes())
    assert written.stat().st_size < given.stat().st_size / 2


def test_references_go_along_with_the_chats_they_came_from(
    source: Path, target: Path, tmp_path: Path
) -> None:
    made, kept = tmp_path / "made", tmp_path / "kept"
    made.mkdir()
    kept.mkdir()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    drawn = panel_conversation(0)
    ids = tokenizer.encode(render_training_text(load_template(), drawn), add_special_tokens=False).ids
    (made / PANEL).write_text(json.dumps({"entries": [{"name": "conversation 0", "ids": ids}]}))
    (made / GREEDY).write_text("[]")

    install(source, target, made, kept)

    (entry,) = json.loads((kept / PANEL).read_bytes())["entries"]
    assert (kept / GREEDY).read_text() == "[]"
    assert entry["ids"] == ids
    assert entry["chat"]["messages"][-1] == {"role": "user", "content": drawn.turns[-1].user}
    text = tokenizer.decode(ids[: entry["num_prompt"]], skip_special_tokens=False)
    assert text.endswith(f"{drawn.turns[-1].user}<|assistant|><think>")


def test_another_tokenizer_is_refused(source: Path, target: Path) -> None:
    edit_json(source / "tokenizer.json", lambda content: content["added_tokens"].pop())
    refuses(source, target, "tokenizer.json: differs")


def test_a_missing_tensor_is_refused(source: Path, target: Path) -> None:
    edit_header(source / "model.safetensors", lambda header: header.pop("lm_head.suh"))
    refuses(source, target, "lm_head")


def test_a_missing_file_is_refused(source: Path, target: Path) -> None:
    (source / "processor_config.json").unlink()
    refuses(source, target, "processor_config.json missing")


def test_too_large_a_checkpoint_is_refused(source: Path, target: Path) -> None:
    storage = source / "quantization_config.json"
    edit_json(storage, lambda content: content.update(padding="x" * 20_000_000))
    refuses(source, target, "more than 20000000")


def test_missing_references_are_refused(source: Path, target: Path, tmp_path: Path) -> None:
    refuses(source, target, "demo-exl3-ref-panel.json, demo-exl3-greedy.json missing", tmp_path)


def refuses(source: Path, target: Path, needle: str, references: Path | None = None) -> None:
    before = {path.name for path in target.iterdir()}
    with pytest.raises(CheckpointError, match=needle):
        install(source, target, references)
    assert {path.name for path in target.iterdir()} == before
