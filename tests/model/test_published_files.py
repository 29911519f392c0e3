"""The built-in configuration of the published model says what its config.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm53srv.errors import ConfigError
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import AttentionKind, MlpKind, load_model_config
from glm53srv.model.published import PUBLISHED
from glm53srv.model.published_files import published_config, published_model, write_published_files

WITHOUT_EFFECT = {"initializer_range", "output_router_logits", "router_aux_loss_coef", "use_cache"}
"""Keys of training and of transformers' own, which no reader of ours or of exllamav3 looks at."""


def test_the_written_files_are_read_as_the_published_model(tmp_path: Path) -> None:
    write_published_files(tmp_path)
    assert load_model_config(tmp_path) == PUBLISHED


def test_every_key_is_that_of_the_published_file(shared_dir: Path) -> None:
    theirs = json.loads((shared_dir / "fixtures/glm/config.json").read_text(encoding="utf-8"))
    ours = published_config()
    text = theirs["text_config"]
    assert text.pop("num_nextn_predict_layers") == 1
    assert ours["text_config"].pop("num_nextn_predict_layers") == 0  # nobody reads that layer
    assert text.keys() - ours["text_config"].keys() == WITHOUT_EFFECT
    assert ours.pop("quantization_config")["quant_method"] == "exl3"
    assert {**theirs, **ours} == theirs | {"text_config": ours["text_config"]}
    assert {**text, **ours["text_config"]} == text | {"tie_word_embeddings": False}


@pytest.mark.parametrize("num_layers", [4, 5, 15, 44, 45])
def test_fewer_layers_are_the_first_ones(tmp_path: Path, num_layers: int) -> None:
    write_published_files(tmp_path, num_layers)
    config = load_model_config(tmp_path)
    assert config.attention_kinds == PUBLISHED.attention_kinds[:num_layers]
    assert config == published_model(num_layers)
    assert AttentionKind.MLA in config.attention_kinds
    assert MlpKind.SPARSE in config.mlp_kinds


def test_the_weights_file_is_whole_and_empty(tmp_path: Path) -> None:
    write_published_files(tmp_path, 4)
    assert list(Checkpoint(tmp_path).names()) == []


@pytest.mark.parametrize("num_layers", [-1, 0, 3, 46])
def test_layers_that_are_not_there_are_refused(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"--layers {num_layers}: from 4, .* to 45"):
        published_config(num_layers)
