"""A small byte-level BPE tokenizer with GLM's pre-tokenizer and GLM's control tokens.

The control tokens are spelled and flagged exactly as in the published tokenizer (tokenizer.json of
GLM-5.3-Flash), so that the prompt renderer and the output parser run unchanged; only the ids and the ordinary
vocabulary are smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from glm53srv.model.pack_words import WORDS

NUM_MERGES = 2000

# The pattern of the published tokenizer: contractions, words, up to three digits, punctuation, white space.
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL_TOKENS = (
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
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
)
"""Removed from text by skip_special_tokens, in id order."""

TEXT_TOKENS = (
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""Single ids that stay in decoded text, after the special ones."""

EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
PAD_TOKEN = "<|endoftext|>"


def train_tokenizer() -> Tokenizer:
    """Train on the word list. One version of the tokenizers package gives the same bytes on every run."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
    return tokenizer


def _training_text() -> Iterator[str]:
    """Give each word with a space before it and capitalised, earlier words more often; then what joins them.

    Every count is different, so that no two merges tie: the trainer's choice among equals is its own affair.
    """
    num_words = len(WORDS)
    for rank, word in enumerate(WORDS):
        yield f" {word}" * (4 * (num_words - rank) + 40)
        yield f" {word.capitalize()}" * (2 + (num_words - rank) // 8)
    for rank, joint in enumerate(
        (", ", ". ", ".\n", "\n\n", "? ", "! ", ": ", "; ", ' "', '" ', "'s ", " - ")
    ):
        yield joint * (2000 - rank)
