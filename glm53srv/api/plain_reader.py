"""Output as it is: the reader of protocols that know neither reasoning nor calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from glm53srv.api.markers import Marker, Piece, piece_text
from glm53srv.api.output_events import ContentDelta, OutputEvent
from glm53srv.api.tokenizer import Tokenizer


class PlainReader:
    """Passes text on, markers spelled out; follows <think> and </think> only to count reasoning tokens."""

    has_open_call = False
    num_complete_calls = 0

    def __init__(self, *, starts_in_reasoning: bool = False) -> None:
        self.in_reasoning = starts_in_reasoning

    def push(self, pieces: Iterable[Piece]) -> list[OutputEvent]:
        """Take output, give all of it."""
        texts = []
        for piece in pieces:
            if piece is Marker.THINK:
                self.in_reasoning = True
            elif piece is Marker.THINK_END:
                self.in_reasoning = False
            texts.append(piece_text(piece))
        text = "".join(texts)
        return [ContentDelta(text)] if text else []

    def finish(self, *, closes_calls: bool = False) -> list[OutputEvent]:
        """End the output; nothing is ever held."""
        return []


def ends_in_reasoning(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Tell whether a raw prompt ends inside an open <think>."""
    for token_id in reversed(prompt_ids):
        marker = tokenizer.markers.get(token_id)
        if marker in (Marker.THINK, Marker.THINK_END):
            return marker is Marker.THINK
    return False
