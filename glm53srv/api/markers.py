"""The eight markers of GLM's output format, as the text pipeline passes them on.

A marker is one token of the checkpoint (an added token of that spelling). The same characters spelled out of
ordinary tokens are text. Text and markers therefore travel as separate pieces from the detokenizer on.
"""

from __future__ import annotations

import enum


class Marker(enum.Enum):
    """A marker token; the value is its spelling (added tokens of the GLM tokenizer, special = false)."""

    THINK = "<think>"
    THINK_END = "</think>"
    TOOL_CALL = "<tool_call>"
    TOOL_CALL_END = "</tool_call>"
    ARG_KEY = "<arg_key>"
    ARG_KEY_END = "</arg_key>"
    ARG_VALUE = "<arg_value>"
    ARG_VALUE_END = "</arg_value>"


CALL_MARKERS = frozenset(Marker) - {Marker.THINK, Marker.THINK_END}
"""Those that belong to tool calls."""

Piece = str | Marker
"""Decoded output: text, never empty, or one marker."""


def piece_text(piece: Piece) -> str:
    """Spell a piece."""
    return piece if isinstance(piece, str) else str(piece.value)
