"""Segments to ids and ids to bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer

from glm53srv.api.markers import Marker
from glm53srv.api.tokenizer import Segment, Tokenizer, TooManyIds
from glm53srv.errors import CheckpointError
from tests.api.builders import PLAIN_ADDED, SPECIAL, small_hf_tokenizer


def test_control_segment_is_one_id_and_its_spelling_in_text_is_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode([Segment("<|user|>", is_control=True), Segment("<|user|></think>")])
    assert ids[0] == tokenizer.control_id("<|user|>")
    assert not set(ids[1:]) & {tokenizer.control_id(name) for name in (*SPECIAL, *PLAIN_ADDED)}
    assert tokenizer.decode_bytes(ids) == b"<|user|><|user|></think>"


def test_neighbouring_text_is_encoded_as_one_piece(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([Segment("hel"), Segment("lo the")]) == tuple(tokenizer.encode_text("hello the"))


def test_empty_text_has_no_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([]) == ()
    assert tokenizer.encode([Segment("")]) == ()


def test_raw_text_may_carry_control_tokens(tokenizer: Tokenizer) -> None:
    think = tokenizer.control_id("<think>")
    assert tokenizer.encode_with_controls("a<think>") == [*tokenizer.encode_text("a"), think]


@pytest.mark.parametrize("text", ["héllo 🙂 the end", "\x00\x7f\xa0\u2028\ufeff", "日本語\r\n\t  x"])
def test_bytes_of_all_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode_text(text)) == text.encode()


def test_special_tokens_can_be_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode([Segment("<|user|>", is_control=True), Segment("hello")])
    assert tokenizer.decode_bytes(ids, skip_special_tokens=True) == b"hello"


def test_an_id_without_a_token_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.num_ids) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_missing_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "[]"])
def test_broken_file_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def test_missing_control_token_is_named() -> None:
    names = [name for name in (*SPECIAL, *PLAIN_ADDED) if name != "</think>"]
    with pytest.raises(CheckpointError, match="x: has no token '</think>'"):
        Tokenizer(small_hf_tokenizer(names), source="x")


def test_glm_ids(glm_tokenizer: Tokenizer) -> None:
    assert glm_tokenizer.num_ids == 154856
    assert glm_tokenizer.markers[154841] is Marker.THINK
    assert glm_tokenizer.markers[154850] is Marker.ARG_VALUE_END
    assert glm_tokenizer.encode_text("</think>") == [522, 26779, 29]
    assert glm_tokenizer.is_special(154827)
    assert not glm_tokenizer.is_special(154842)


def test_glm_plain_tokenizer_equals_the_file_without_added_tokens(
    glm_dir: Path, glm_tokenizer: Tokenizer
) -> None:
    import orjson

    document = orjson.loads((glm_dir / "tokenizer.json").read_bytes())
    document["added_tokens"] = []
    stripped = HfTokenizer.from_buffer(orjson.dumps(document))
    for text in (
        "Hi <|user|> there",
        "a</think>b <tool_call>",
        "naïve 東京 👩‍🔬 123456",
        " \n\n  x",
        "/nothink",
    ):
        assert glm_tokenizer.encode_text(text) == stripped.encode(text, add_special_tokens=False).ids


def test_glm_goldens_encode_alike(glm_tokenizer: Tokenizer, template_goldens: dict[str, Any]) -> None:
    prompts = [
        r["prompt"] for case in template_goldens.values() for r in case["render"].values() if "prompt" in r
    ]
    assert len(prompts) >= 40
    for prompt in prompts:
        assert glm_tokenizer.decode_bytes(glm_tokenizer.encode_with_controls(prompt)).decode() == prompt


def test_a_prompt_beyond_the_limit_is_counted_not_returned(tokenizer: Tokenizer) -> None:
    segments = [Segment("<|user|>", is_control=True), Segment("abc")]
    assert len(tokenizer.encode(segments, max_ids=4)) == 4
    with pytest.raises(TooManyIds) as caught:
        tokenizer.encode(segments, max_ids=3)
    assert caught.value.num_ids == 4


@pytest.mark.parametrize("max_ids", [0, 1, 5, 100])
def test_a_prompt_far_beyond_the_limit_is_estimated(tokenizer: Tokenizer, max_ids: int) -> None:
    segments = [Segment("<|user|>", is_control=True), Segment("ab " * 100_000)]
    with pytest.raises(TooManyIds) as caught:
        tokenizer.encode(segments, max_ids=max_ids)
    assert 0.9 * 300_001 < caught.value.num_ids < 1.1 * 300_001


def test_long_tokens_may_fit_where_their_characters_are_many(tokenizer: Tokenizer) -> None:
    """The early look must not refuse what fits: 5 characters per id here, and room for exactly all."""
    segments = [Segment("hello" * 4000)]
    num_ids = len(tokenizer.encode(segments))
    assert tokenizer.encode(segments, max_ids=num_ids) == tokenizer.encode(segments)
    with pytest.raises(TooManyIds):
        tokenizer.encode(segments, max_ids=num_ids - 1)
