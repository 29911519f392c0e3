"""The random model: the same bytes every time, marked, never in the way of somebody's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from glm53srv.errors import ConfigError
from glm53srv.model.config import load_model_config
from glm53srv.model.decoder import Decoder
from glm53srv.model.pack import is_random_model, pack_random_model
from glm53srv.model.pack_tokenizer import EOS_TOKENS, SPECIAL_TOKENS, TEXT_TOKENS
from glm53srv.model.vocabulary import count_token_ids


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_same_seed_gives_the_same_bytes_and_another_seed_others(
    random_model_dir: Path, tmp_path: Path
) -> None:
    pack_random_model(tmp_path / "again")
    pack_random_model(tmp_path / "other", seed=1)
    first, other = digests(random_model_dir), digests(tmp_path / "other")
    assert digests(tmp_path / "again") == first
    assert {name for name in first if first[name] != other[name]} == {"config.json", "model.safetensors"}


def test_directory_has_the_files_of_a_published_checkpoint(random_model_dir: Path) -> None:
    assert set(digests(random_model_dir)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "processor_config.json",
        "quantization_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    storage = json.loads((random_model_dir / "quantization_config.json").read_bytes())["tensor_storage"]
    assert storage["lm_head"]["bits_per_weight"] == 6
    assert storage["lm_head"]["mul1_multiplier"] == 0x83DCD12D


def test_progress_runs_from_0_to_1(tmp_path: Path) -> None:
    fractions: list[float] = []
    pack_random_model(tmp_path / "m", progress=lambda fraction, stage: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_own_model_is_replaced_and_nothing_is_left_over(tmp_path: Path) -> None:
    pack_random_model(tmp_path / "m", seed=1)
    assert is_random_model(tmp_path / "m", seed=1)
    assert not is_random_model(tmp_path / "m", seed=2)
    pack_random_model(tmp_path / "m", seed=2)
    assert is_random_model(tmp_path / "m", seed=2)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_empty_directory_is_used_and_a_foreign_one_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pack_random_model(tmp_path / "empty")
    assert is_random_model(tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="exists and is not a random model; choose another directory"):
        pack_random_model(tmp_path / "mine")
    assert (tmp_path / "mine" / "config.json").read_text() == "{}"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not a random model"):
        pack_random_model(tmp_path / "file")


def test_failure_leaves_no_directory_behind(tmp_path: Path) -> None:
    def fail_at_the_end(fraction: float, stage: str) -> None:
        if stage == "writing weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_random_model(tmp_path / "m", progress=fail_at_the_end)
    assert list(tmp_path.iterdir()) == []


def test_control_tokens_are_spelled_and_flagged_as_published(
    random_model_dir: Path, shared_dir: Path
) -> None:
    import gzip

    published = json.loads(gzip.decompress((shared_dir / "fixtures/glm/tokenizer.json.gz").read_bytes()))
    packed = json.loads((random_model_dir / "tokenizer.json").read_bytes())
    first_published, first_packed = published["added_tokens"][0]["id"], packed["added_tokens"][0]["id"]
    assert len(packed["added_tokens"]) == 36
    for ours, theirs in zip(packed["added_tokens"], published["added_tokens"], strict=True):
        assert ours.pop("id") - first_packed == theirs.pop("id") - first_published
        assert ours == theirs
    assert packed["pre_tokenizer"] == published["pre_tokenizer"]
    assert packed["decoder"]["type"] == published["decoder"]["type"]


def test_tokenizer_knows_words_and_spells_everything_else(random_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(random_model_dir / "tokenizer.json"))
    assert len(tokenizer.encode(" the river and the old fox").ids) == 6
    for text in ("naïve 漢字 🦊\n\t", "x" * 50, ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    single = [tokenizer.encode(text).ids for text in SPECIAL_TOKENS + TEXT_TOKENS]
    assert all(len(ids) == 1 for ids in single)
    config = load_model_config(random_model_dir)
    assert config.eos_token_ids == tuple(tokenizer.token_to_id(text) for text in EOS_TOKENS)
    num_ids = count_token_ids(random_model_dir, config.vocab_size)
    assert num_ids == tokenizer.get_vocab_size()
    assert num_ids < config.vocab_size  # the head has rows that must never be sampled


def test_outputs_have_the_size_of_a_trained_model(random_decoder: Decoder) -> None:
    ids = np.random.default_rng(5).integers(0, 2256, 64).tolist()
    logits = random_decoder.forward(ids)
    assert np.isfinite(logits).all()
    assert 2 < logits[:, 256:2256].std() < 3  # words
    assert not logits[:, :256].any()  # single bytes, which alone are no text
    assert len(set(logits.argmax(axis=1).tolist())) > 32  # not always the same token
