"""The checkpoint's tokenizer: prompt segments to ids, ids to bytes.

Added tokens match anywhere in text, so a user who types `<|user|>` or `</think>` would write control tokens
if a rendered prompt were encoded in one go. Prompts are therefore lists of segments: control segments are
looked up by name, free text goes through a second tokenizer that knows no added tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from glm53srv.api.markers import Marker
from glm53srv.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"

PROMPT_CONTROLS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
RESPONSE_CONTROLS = ("<tool_response>", "</tool_response>")


EARLY_CHARS_PER_ID = 8
"""Text longer than this per id of room is tried in part first; prose has 4 to 5 characters per id."""

EARLY_SLACK_IDS = 16
"""A cut text may have a few more ids than its part of the whole; so many do not count."""


class TooManyIds(Exception):
    """A prompt has more ids than the caller can use. num_ids: how many; an estimate if far too many."""

    def __init__(self, num_ids: int) -> None:
        super().__init__(f"{num_ids} ids")
        self.num_ids = num_ids


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a rendered prompt: the spelling of one control token, or free text of any length."""

    text: str
    is_control: bool = False


class Tokenizer:
    """Encodes prompts and looks up the bytes of tokens.

    Immutable but for a cache of token bytes; may be used from several threads.
    """

    def __init__(self, full: HfTokenizer, *, source: str) -> None:
        """Wrap a loaded tokenizer. source: name for error texts. Raises CheckpointError (missing control)."""
        self._plain = HfTokenizer(full.model)  # shares the vocabulary, so this costs microseconds
        self._plain.pre_tokenizer = full.pre_tokenizer
        if full.normalizer is not None:
            self._plain.normalizer = full.normalizer
        self._full = full
        added = full.get_added_tokens_decoder()
        self._added_ids: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self._added_bytes = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        wanted = (*PROMPT_CONTROLS, *RESPONSE_CONTROLS, *(marker.value for marker in Marker))
        for name in wanted:
            if name not in self._added_ids:
                raise CheckpointError(
                    f"{source}: has no token {name!r}, so it is not a GLM-5.3 tokenizer; "
                    "use the one of the checkpoint"
                )
        self._markers = {self._added_ids[marker.value]: marker for marker in Marker}
        self._byte_of_char = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read tokenizer.json of a model directory. Raises CheckpointError."""
        path = model_dir / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; copy it from the checkpoint's repository")
        try:
            full = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of a file
            raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from error
        return cls(full, source=str(path))

    @property
    def num_ids(self) -> int:
        """Ids that stand for a token are 0 <= id < num_ids; rows of the head beyond them are padding."""
        return int(self._full.get_vocab_size(with_added_tokens=True))

    @property
    def markers(self) -> dict[int, Marker]:
        """The output markers by token id."""
        return self._markers

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of all added tokens: markers, roles, ends."""
        return frozenset(self._added_bytes)

    def control_id(self, text: str) -> int | None:
        """Look up an added token by its spelling; None for any other text."""
        return self._added_ids.get(text)

    def is_special(self, token_id: int) -> bool:
        """Tell whether skip_special_tokens removes this token from text."""
        return token_id in self._special_ids

    def encode_text(self, text: str) -> list[int]:
        """Encode free text; nothing in it becomes a control token."""
        return list(self._encode_run(text).ids)

    def encode_with_controls(self, text: str, *, max_ids: int | None = None) -> list[int]:
        """Encode text in which the spelling of a control token stands for the token (raw completions).

        Raises TooManyIds when it has more than max_ids.
        """
        if not text:
            return []
        if max_ids is not None:
            self._give_up_early(text, max_ids, (Segment(text),))
        encoding = self._full.encode_batch_fast([text], add_special_tokens=False)[0]
        if max_ids is not None and len(encoding) > max_ids:
            raise TooManyIds(len(encoding))
        return list(encoding.ids)

    def encode(self, segments: Sequence[Segment], *, max_ids: int | None = None) -> tuple[int, ...]:
        """Encode a rendered prompt; neighbouring free text is encoded as one piece.

        Raises TooManyIds when the prompt has more than max_ids. A prompt far beyond is given up early, and
        never are millions of ids made into Python objects.
        """
        parts: list[Any] = []  # control ids, and encodings of the text between them
        num_ids = 0
        for run in self._runs(segments):
            if isinstance(run, int):
                parts.append(run)
                num_ids += 1
            else:
                if max_ids is not None:
                    self._give_up_early(run, max_ids - num_ids, segments)
                parts.append(self._encode_run(run))
                num_ids += len(parts[-1])
        if max_ids is not None and num_ids > max_ids:
            raise TooManyIds(num_ids)
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += part.ids
        return tuple(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes a token stands for; b"" for an id without a token (padding rows of the head)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up_bytes(token_id)
        return known

    def decode_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> bytes:
        """Join the bytes of tokens."""
        return b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self._special_ids)
        )

    def _runs(self, segments: Sequence[Segment]) -> Iterator[int | str]:
        """Give the ids of control segments and, joined, the text between them."""
        pending: list[str] = []
        for segment in segments:
            if not segment.is_control:
                pending.append(segment.text)
                continue
            if pending:
                yield "".join(pending)
                pending.clear()
            yield self._added_ids[segment.text]
        if pending:
            yield "".join(pending)

    def _give_up_early(self, text: str, room: int, segments: Sequence[Segment]) -> None:
        """Raise TooManyIds, with an estimate, if the first part of a very long text is too much already."""
        num_chars = EARLY_CHARS_PER_ID * (room + EARLY_SLACK_IDS)
        if len(text) <= num_chars:
            return
        num_ids = len(self._encode_run(text[: max(num_chars, 1)]))
        if num_ids > room + EARLY_SLACK_IDS:
            total_chars = sum(len(segment.text) for segment in segments)
            raise TooManyIds(num_ids * total_chars // max(num_chars, 1))

    def _encode_run(self, text: str) -> Any:
        """Encode text; len() of the result counts its ids without making them Python objects."""
        # The batch call releases the interpreter lock while it works, the plain one does not.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0]

    def _look_up_bytes(self, token_id: int) -> bytes:
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        spelled = self._full.id_to_token(token_id) if token_id >= 0 else None
        if spelled is None:
            return b""
        try:
            return bytes(self._byte_of_char[char] for char in spelled)
        except KeyError:  # an entry outside the byte alphabet stands for itself
            return str(spelled).encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte for each character of the byte-level BPE alphabet.

    Printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards in byte order (GPT-2's
    encoder.py, kept by every byte-level tokenizer since).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet
