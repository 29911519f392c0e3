"""Bytes to text, one token at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53srv.api.detokenizer import Detokenizer
from glm53srv.api.markers import Marker, Piece
from glm53srv.api.tokenizer import Tokenizer
from tests.api.builders import join_pieces, small_tokenizer


def byte_token(byte: int) -> int:
    """The id of the token that is one byte (the small tokenizer has one for each)."""
    for token_id in range(256):
        if small_tokenizer().token_bytes(token_id) == bytes([byte]):
            return token_id
    raise AssertionError(byte)


BYTE_TOKENS = [byte_token(byte) for byte in range(256)]


def detokenize(token_ids: list[int], *, skip_special_tokens: bool = True) -> list[Piece]:
    detokenizer = Detokenizer(small_tokenizer(), skip_special_tokens=skip_special_tokens)
    pieces = [piece for token_id in token_ids for piece in detokenizer.push(token_id)]
    return [*pieces, *detokenizer.flush()]


def test_a_split_character_comes_out_whole_with_its_last_byte() -> None:
    detokenizer = Detokenizer(small_tokenizer())
    outs = [detokenizer.push(BYTE_TOKENS[byte]) for byte in "🙂!".encode()]
    assert outs == [[], [], [], ["🙂"], ["!"]]


@given(st.text())
def test_valid_text_is_exact_and_never_holds_a_replacement(text: str) -> None:
    pieces = detokenize([BYTE_TOKENS[byte] for byte in text.encode()])
    assert join_pieces(pieces) == text
    assert all(isinstance(piece, str) and piece for piece in pieces)


@given(st.binary())
def test_any_bytes_give_what_decoding_them_at_once_gives(data: bytes) -> None:
    assert join_pieces(detokenize([BYTE_TOKENS[byte] for byte in data])) == data.decode(errors="replace")


def test_an_incomplete_character_at_the_end_is_replaced_once() -> None:
    assert detokenize([BYTE_TOKENS[byte] for byte in "a🙂".encode()[:-1]]) == ["a", "\ufffd"]


def test_an_incomplete_character_before_a_marker_is_replaced_before_it(tokenizer: Tokenizer) -> None:
    think_end = tokenizer.control_id("</think>") or -1
    assert detokenize([BYTE_TOKENS[0xE6], think_end, BYTE_TOKENS[0x61]]) == ["\ufffd", Marker.THINK_END, "a"]


def test_markers_are_pieces_and_their_spelling_is_text(tokenizer: Tokenizer) -> None:
    spelled = tokenizer.encode_text("<think>")
    pieces = detokenize([*spelled, tokenizer.control_id("<think>") or -1])
    assert join_pieces(pieces[:-1]) == "<think>"
    assert all(isinstance(piece, str) for piece in pieces[:-1])
    assert pieces[-1] is Marker.THINK


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<|user|>b")])
def test_special_tokens_are_text_only_on_request(tokenizer: Tokenizer, skip: bool, expected: str) -> None:
    user = tokenizer.control_id("<|user|>") or -1
    token_ids = [BYTE_TOKENS[0x61], user, BYTE_TOKENS[0x62]]
    assert join_pieces(detokenize(token_ids, skip_special_tokens=skip)) == expected


def test_padding_ids_give_nothing(tokenizer: Tokenizer) -> None:
    assert detokenize([tokenizer.num_ids + 5]) == []
