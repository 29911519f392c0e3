"""Grammars to token masks, through llguidance.

GrammarCompiler is made once, when the model loads, and shared: the API checks a request's constraint with it
in a text thread, the sampler then copies the compiled grammar on the engine thread. Measured with GLM's
vocabulary of 154,856 ids (EPYC virtual machine, 2026-11; bench/grammar.py): see docs/structured-output.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from numpy.typing import NDArray

from glm53srv.errors import GrammarError
from glm53srv.request import Constraint

MAX_REASON_CHARS = 500
CACHED_GRAMMARS = 64
"""Compiled grammars that are kept; agents send the same schema with every request."""


class GrammarCompiler:
    """Compiles constraints over one vocabulary.

    May be used from several threads: the vocabulary is immutable, and the cache is functools' own, which
    holds its own lock.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        control_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """Index the vocabulary: about 1.5 s for GLM's.

        token_bytes: what each id stands for, b"" for none. control_ids: ids that no text may match.
        encode: text to ids without control tokens.
        """
        self._num_ids = len(token_bytes)
        self._eos_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < self._num_ids]
        vocabulary = _Vocabulary(token_bytes, control_ids, self._eos_ids, encode)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=self._num_ids, eos_token=self._eos_ids
        )
        # Its error texts would otherwise show the parser's state, and with it the output.
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled = functools.lru_cache(CACHED_GRAMMARS)(self._compile)

    def check(self, constraint: Constraint) -> None:
        """Compile, and keep the result for matcher(). Raises GrammarError.

        Takes 1 ms for ordinary schemas and up to a second for extreme ones: not on the event loop.
        """
        self._compiled(constraint)

    def matcher(self, constraint: Constraint) -> TokenMatcher:
        """Give a matcher at the start of the grammar. Raises GrammarError."""
        return TokenMatcher(self._compiled(constraint).deep_copy(), self._num_ids, self._eos_ids)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _source(constraint), log_level=0, limits=self._limits)
        except ValueError as error:  # text that is no JSON where JSON is needed
            raise GrammarError(_one_line(str(error))) from error
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        return matcher


class TokenMatcher:
    """Where one output stands in its grammar. Engine thread only.

    error: why it cannot go on, or None.
    """

    def __init__(self, matcher: LLMatcher, num_ids: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_ids = num_ids
        self._eos_ids = frozenset(eos_ids)
        self.error: str | None = None

    def allowed(self) -> NDArray[np.bool_]:
        """Give the ids that may come next, bool (num_ids,); only end ids once the grammar is through."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._note_error()
        return np.unpackbits(bits, count=self._num_ids, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Take the sampled token. End ids beyond the end change nothing."""
        if self.error is None and not (self._matcher.is_stopped() and token_id in self._eos_ids):
            self._matcher.consume_token(token_id)
            self._note_error()

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = _one_line(self._matcher.get_error())


class _Vocabulary:
    """The attributes that llguidance's TokenizerWrapper reads."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        control_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(control_ids)
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)


def _source(constraint: Constraint) -> str:
    match constraint.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.text)
        case "regex":
            # "d" makes \d an ASCII digit, as everybody means it.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.text, 'd')}/")
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.text)
        case "llguidance":
            json.loads(constraint.text)  # anything else would be read as Lark
            return constraint.text


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_REASON_CHARS else words[: MAX_REASON_CHARS - 3] + "..."
