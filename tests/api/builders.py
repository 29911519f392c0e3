"""Builders shared by the tests of the API."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from glm53srv.api.markers import Marker, Piece, piece_text
from glm53srv.api.tokenizer import Tokenizer

SPECIAL = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
PLAIN_ADDED = (*(marker.value for marker in Marker), "<tool_response>", "</tool_response>", "/nothink")


def small_hf_tokenizer(added: Iterable[str] = (*SPECIAL, *PLAIN_ADDED)) -> HfTokenizer:
    """Give a byte-level tokenizer with one token per byte, a few merges, and GLM's added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: rank for rank, char in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "l"), ("e", "ll"), ("ell", "o")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = HfTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=name in SPECIAL, normalized=False) for name in added])
    return tokenizer


@functools.cache
def small_tokenizer() -> Tokenizer:
    """Wrap the small tokenizer; immutable, so one is enough."""
    return Tokenizer(small_hf_tokenizer(), source="small")


def split_markers(text: str) -> list[Piece]:
    """Read text in which every marker string stands for the marker (as the fixtures write output down)."""
    pieces: list[Piece] = []
    rest = text
    while rest:
        hits = [(at, marker) for marker in Marker if (at := rest.find(marker.value)) >= 0]
        if not hits:
            pieces.append(rest)
            break
        at, marker = min(hits, key=lambda hit: hit[0])
        if at:
            pieces.append(rest[:at])
        pieces.append(marker)
        rest = rest[at + len(marker.value) :]
    return pieces


def join_pieces(pieces: Iterable[Piece]) -> str:
    """Spell pieces out."""
    return "".join(piece_text(piece) for piece in pieces)
