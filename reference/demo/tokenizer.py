"""Train the demo model's tokenizer: byte-level BPE with GLM's special tokens, same spelling and flags.

    python -m reference.demo.tokenizer reference/demo/checkpoint

writes tokenizer.json, tokenizer_config.json and generation_config.json. Deterministic: the corpus is the
first conversations of the training data. Digits are single tokens (GLM groups up to three): sums and copied
numbers are then made of ten symbols, which a small model learns.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from glm53srv.model.pack_tokenizer import EOS_TOKENS, SPECIAL_TOKENS, TEXT_TOKENS
from reference.demo.dialogue import training_conversation
from reference.demo.rendering import LossMask, load_template, render_training_text

VOCAB_SIZE = 4096
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS_CONVERSATIONS = 40_000
_ADDED = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS + TEXT_TOKENS))


def corpus(num_conversations: int) -> Iterator[str]:
    """Yield the free text between added tokens."""
    template = load_template()
    for seed in range(num_conversations):
        text = render_training_text(template, training_conversation(seed, long=False))
        yield from (piece for piece in _ADDED.split(text) if piece)


def train_tokenizer(num_conversations: int = CORPUS_CONVERSATIONS) -> Tokenizer:
    """Train on the generated corpus; added tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(TEXT_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_conversations), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TEXT_TOKENS])
    return tokenizer


def spelling_twins(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, int]]:
    """Give (id of the word, id of the word behind a space) of the words that are one token both ways."""
    both = ([tokenizer.encode(text, add_special_tokens=False).ids for text in (w, f" {w}")] for w in words)
    return [(plain[0], spaced[0]) for plain, spaced in both if len(plain) == len(spaced) == 1]


def write_files(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and the two small files that name its special ids."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "model_max_length": 8192,
    }
    generation = {
        "eos_token_id": [tokenizer.token_to_id(token) for token in EOS_TOKENS],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "temperature": 1.0,
        "top_p": 0.95,
    }
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def loss_mask_for(tokenizer: Tokenizer) -> LossMask:
    """Build the mask of learned tokens from a tokenizer's ids."""
    stops = [token_id(tokenizer, token) for token in EOS_TOKENS]
    return LossMask(
        token_id(tokenizer, "<|assistant|>"),
        stops,
        token_id(tokenizer, "<think>"),
        token_id(tokenizer, "</think>"),
    )


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Give an added token's id. Raises ValueError if the tokenizer lacks it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return int(found)


if __name__ == "__main__":
    write_files(train_tokenizer(), Path(sys.argv[1]))
