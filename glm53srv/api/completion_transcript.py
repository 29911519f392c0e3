"""One choice of a raw completion as it grows: its text, and the lists of its log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm53srv.api.detokenizer import Detokenizer
from glm53srv.api.markers import Piece, piece_text
from glm53srv.api.output_events import ContentDelta
from glm53srv.api.service import GenerationJob, StepOutput
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.request import TokenLogprobs


@dataclass(slots=True)
class Delta:
    """More of one choice: text, and the four parallel lists of its log probabilities."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: Delta) -> None:
        """Append what came after."""
        self.text += other.text
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def logprobs_body(self) -> dict[str, Any]:
        """Spell the lists."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


class Transcript:
    """Turns one choice's outputs into deltas; streams and whole answers are both made of them."""

    def __init__(self, job: GenerationJob, echo: str, tokenizer: Tokenizer, *, echoes_tokens: bool) -> None:
        """echo: text to begin with. echoes_tokens: begin with the prompt's tokens, as they are judged."""
        self._prompt_ids = job.request.prompt_ids
        self._tokenizer = tokenizer
        self._echo = echo
        self._has_logprobs = job.request.sampling.num_logprobs is not None
        self._next_position = 0 if echoes_tokens else len(self._prompt_ids)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)  # of the prompt
        self._output = Detokenizer(tokenizer, skip_special_tokens=job.skip_special_tokens)
        self._offset = 0  # characters before the next token

    def opening(self) -> Delta:
        """Give what stands before the first output: the prompt without, or its first token with logprobs."""
        delta = Delta(self._echo)
        if self._next_position == 0:
            self._echo_token(delta, None)
        return delta

    def step(self, output: StepOutput) -> Delta:
        """Give what one step adds."""
        delta = Delta()
        for news in output.prompt:
            for logprobs in news.logprobs:
                self._echo_token(delta, logprobs)
        delta.text += "".join(event.text for event in output.events if isinstance(event, ContentDelta))
        if self._has_logprobs:
            tokens = [*output.tokens] if output.end_token is None else [*output.tokens, output.end_token]
            for token in tokens:
                if token.token_id is not None:
                    self._add(delta, token.token_id, token.logprobs)
                    if not token.is_stop_token:
                        self._offset += _num_chars(self._output.push(token.token_id))
        return delta

    def _echo_token(self, delta: Delta, logprobs: TokenLogprobs | None) -> None:
        """Add the next prompt token, and after the last one what it leaves incomplete."""
        token_id = self._prompt_ids[self._next_position]
        self._next_position += 1
        self._add(delta, token_id, logprobs)
        pieces = self._detokenizer.push(token_id)
        if self._next_position == len(self._prompt_ids):
            pieces += self._detokenizer.flush()
        delta.text += "".join(map(piece_text, pieces))
        self._offset += _num_chars(pieces)

    def _add(self, delta: Delta, token_id: int, logprobs: TokenLogprobs | None) -> None:
        spelled = self._spell(token_id)
        delta.tokens.append(spelled)
        delta.text_offset.append(self._offset)
        if logprobs is None:
            delta.token_logprobs.append(None)
            delta.top_logprobs.append(None)
            return
        top: dict[str, float] = {}
        for other_id, logprob in logprobs.top:  # best first: of two that are spelled alike the better stays
            top.setdefault(self._spell(other_id), logprob)
        top.setdefault(spelled, logprobs.logprob)
        delta.token_logprobs.append(logprobs.logprob)
        delta.top_logprobs.append(top)

    def _spell(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def _num_chars(pieces: Sequence[Piece]) -> int:
    return sum(len(piece_text(piece)) for piece in pieces)
