"""Tokens to pieces: incremental and byte-exact.

A character may be spread over several tokens. Bytes of an incomplete character are held until it is
complete, so that no piece ever holds half a character; what is still incomplete at a marker or at the end
becomes U+FFFD, once per broken run, as bytes.decode(errors="replace") does it.
"""

from __future__ import annotations

import codecs

from glm53srv.api.markers import Piece
from glm53srv.api.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. Owned by its stream, used on the event loop only."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._markers = tokenizer.markers
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _new_decoder(errors="replace")

    def push(self, token_id: int) -> list[Piece]:
        """Take one token; give the text and the marker it completes, at most two pieces."""
        marker = self._markers.get(token_id)
        if marker is not None:
            return [*self.flush(), marker]
        if self._tokenizer.is_special(token_id):
            pieces = self.flush()
            if not self._skip_special_tokens:
                pieces.append(self._tokenizer.token_bytes(token_id).decode())
            return pieces
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return [text] if text else []

    def flush(self) -> list[Piece]:
        """End the text: give what an incomplete character leaves behind."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return [text] if text else []
