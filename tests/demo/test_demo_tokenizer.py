"""The demo's tokenizer: GLM's added tokens, bytes for everything, digits alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from glm53srv.model.pack_tokenizer import EOS_TOKENS, SPECIAL_TOKENS, TEXT_TOKENS
from reference.demo.tokenizer import VOCAB_SIZE, spelling_twins

CHECKPOINT = Path(__file__).resolve().parents[2] / "reference/demo/checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_added_tokens_are_those_of_glm_with_the_same_flags(shared_dir: Path) -> None:
    with gzip.open(shared_dir / "fixtures/glm/tokenizer.json.gz") as file:
        official = [(token["content"], token["special"]) for token in json.load(file)["added_tokens"]]

    ours = json.loads((CHECKPOINT / "tokenizer.json").read_text("utf-8"))["added_tokens"]

    assert [(token["content"], token["special"]) for token in ours] == official
    assert tuple(content for content, _ in official) == SPECIAL_TOKENS + TEXT_TOKENS


def test_vocabulary_fills_the_embedding(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


@pytest.mark.parametrize(
    "text",
    ["What is 47 + 38?", "  two  spaces\n\n", "naïve café ☕ 漢字 \x00\x7f", "<tools> 'll don't", "🙂👩‍👩‍👧"],
)
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234", add_special_tokens=False).tokens == ["1", "2", "3", "4"]


def test_generation_config_names_all_three_stop_tokens(tokenizer: Tokenizer) -> None:
    config = json.loads((CHECKPOINT / "generation_config.json").read_text("utf-8"))

    assert config["eos_token_id"] == [tokenizer.token_to_id(token) for token in EOS_TOKENS]


def test_twins_are_one_word_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    twins = spelling_twins(tokenizer, ["velvet", "Jakarta", "no such word"])

    assert [(tokenizer.decode([a]), tokenizer.decode([b])) for a, b in twins] == [
        ("velvet", " velvet"),
        ("Jakarta", " Jakarta"),
    ]
