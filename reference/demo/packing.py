"""Rows of packed conversations, made by worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from reference.demo.dialogue import training_conversation
from reference.demo.drills import drill_conversation
from reference.demo.rendering import load_template, render_training_text
from reference.demo.sample import Conversation
from reference.demo.tokenizer import loss_mask_for

ALIGN = 4
"""Documents start at multiples of the indexer's pool."""
LONG_SHARE = 8
"""One conversation in so many is long, so that sparse attention is trained too."""
DRILL_SHARE = 2
"""One conversation in so many is a drill."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed tokens. ids uint16, learned bool, doc int16; all (rows, tokens)."""

    ids: NDArray[np.uint16]
    learned: NDArray[np.bool_]
    doc: NDArray[np.int16]


def training_sample(number: int) -> Conversation:
    """Give sample `number` of the training stream."""
    if number % DRILL_SHARE == 1:
        return drill_conversation(number)
    return training_conversation(number, long=number % LONG_SHARE == 0)


def make_rows(seed: int, num_rows: int, row_tokens: int) -> Rows:
    """Pack conversations from seed * 1,000,000 on; conversations longer than a row are left out.

    The rest of a row behind the last document is a document of its own that is never learned.
    """
    tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "checkpoint" / "tokenizer.json"))
    mask, template = loss_mask_for(tokenizer), load_template()
    rows = Rows(
        np.zeros((num_rows, row_tokens), np.uint16),
        np.zeros((num_rows, row_tokens), np.bool_),
        np.zeros((num_rows, row_tokens), np.int16),
    )
    row, used, doc = 0, 0, 0
    number = seed * 1_000_000
    while row < num_rows:
        conversation = training_sample(number)
        number += 1
        text = render_training_text(template, conversation)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > row_tokens:
            continue
        if used + len(ids) > row_tokens:
            rows.doc[row, used:] = doc
            row, used, doc = row + 1, 0, 0
            if row == num_rows:
                break
        end = used + len(ids)
        rows.ids[row, used:end] = ids
        rows.learned[row, used:end] = mask.mark(ids)
        used_up = min(row_tokens, -(-end // ALIGN) * ALIGN)
        rows.doc[row, used:used_up] = doc
        used, doc = used_up, doc + 1
    return rows


def stream_rows(first_seed: int, num_rows: int, row_tokens: int, workers: int) -> Generator[Rows, None, None]:
    """Yield batches without end, in seed order, 4 per worker ahead of the reader. Close it to end the
    workers."""
    pool = multiprocessing.get_context("spawn").Pool(workers)
    try:
        seeds = itertools.count(first_seed)
        ahead = deque(
            pool.apply_async(make_rows, (next(seeds), num_rows, row_tokens)) for _ in range(4 * workers)
        )
        while True:
            rows = ahead.popleft().get()
            ahead.append(pool.apply_async(make_rows, (next(seeds), num_rows, row_tokens)))
            yield rows
    finally:
        pool.terminate()
