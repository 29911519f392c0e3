"""What a sequence leaves behind in each layer: recurrent state per slot, and pages of a cache shared by all.

    latent   (pages, 256, kv_lora_rank)            one row per token, per MLA layer
    pooled   (pages, 256 / kpool, index_head_dim)  one row per complete pool of kpool tokens, per MLA layer
    slot     the last 3 inputs of each convolution and the KDA matrices; the raw indexer rows of the pool that
             is not complete yet

A page id means the same page in every layer. Everything belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.model.config import ModelConfig
from glm53srv.model.ops import F32

PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class KdaState:
    """One linear attention layer of one sequence; the arrays are updated in place.

    conv: (conv_kernel - 1, 3 * width), the newest inputs of the convolution, oldest first. matrix: (heads,
    head_dim of keys, head_dim of values).
    """

    conv: F32
    matrix: F32

    def reset(self) -> None:
        """Go back to the start of a sequence."""
        self.conv.fill(0)
        self.matrix.fill(0)


@dataclass(frozen=True, slots=True)
class PoolTail:
    """Indexer rows of the tokens after the last complete pool of one sequence in one MLA layer.

    keys, gates: (kpool, index_head_dim); the first position % kpool rows are valid.
    """

    keys: F32
    gates: F32


class SequenceState:
    """The recurrent state of one slot: a KdaState or PoolTail per layer."""

    def __init__(self, config: ModelConfig) -> None:
        kda, indexer = config.kda, config.indexer
        self.kda = {
            layer: KdaState(
                np.zeros((kda.conv_kernel - 1, 3 * kda.width), np.float32),
                np.zeros((kda.num_heads, kda.head_dim, kda.head_dim), np.float32),
            )
            for layer in config.kda_layers
        }
        self.tails = {
            layer: PoolTail(
                np.zeros((indexer.kpool, indexer.head_dim), np.float32),
                np.zeros((indexer.kpool, indexer.head_dim), np.float32),
            )
            for layer in config.mla_layers
        }

    def reset(self) -> None:
        """Go back to the start of a sequence.

        Tails need nothing: their valid rows follow from the position.
        """
        for state in self.kda.values():
            state.reset()


class PagedRows:
    """Rows of one kind in one layer, in pages. rows: (pages * rows_per_page, width), float32.

    The memory is zero pages of the operating system until it is written.
    """

    def __init__(self, num_pages: int, rows_per_page: int, width: int) -> None:
        self._rows_per_page = rows_per_page
        self._rows = np.zeros((num_pages * rows_per_page, width), np.float32)

    @property
    def rows(self) -> F32:
        """All pages, (pages * rows_per_page, width): for kernels, which read them where they lie."""
        return self._rows

    def write(self, page_ids: NDArray[np.int64], start: int, values: F32) -> None:
        """Store values (n, width) as rows start .. start + n of the sequence with these pages."""
        self._rows[self._places(page_ids, np.arange(start, start + len(values)))] = values

    def read(self, page_ids: NDArray[np.int64], count: int) -> F32:
        """Give the first `count` rows of a sequence; without copying when its pages are neighbours."""
        per_page = self._rows_per_page
        num_pages = -(-count // per_page)
        ids = page_ids[:num_pages]
        if num_pages and ids[-1] - ids[0] == num_pages - 1 and bool(np.all(np.diff(ids) == 1)):
            begin = int(ids[0]) * per_page
            return self._rows[begin : begin + count]
        pages = self._rows.reshape(-1, per_page, self._rows.shape[1])
        return pages[ids].reshape(-1, self._rows.shape[1])[:count]

    def take(self, page_ids: NDArray[np.int64], indices: NDArray[np.int64]) -> F32:
        """Give a copy of chosen rows of a sequence, (len(indices), width)."""
        return np.take(self._rows, self._places(page_ids, indices), axis=0)

    def _places(self, page_ids: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return page_ids[indices // self._rows_per_page] * self._rows_per_page + indices % self._rows_per_page


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The cache of one MLA layer."""

    latent: PagedRows
    pooled: PagedRows


class PagedCache:
    """The caches of all MLA layers, addressed by the same page ids."""

    def __init__(self, config: ModelConfig, num_pages: int) -> None:
        self.num_pages = num_pages
        self.layers = {
            layer: LayerPages(
                PagedRows(num_pages, PAGE_TOKENS, config.mla.kv_lora_rank),
                PagedRows(num_pages, PAGE_TOKENS // config.indexer.kpool, config.indexer.head_dim),
            )
            for layer in config.mla_layers
        }


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence as one call sees it. position: tokens already in its state. page_ids: its pages in order."""

    state: SequenceState
    page_ids: NDArray[np.int64]
    position: int


def view_of(state: SequenceState, page_ids: Sequence[int], position: int) -> SequenceView:
    """Give the view of a sequence whose next token goes to `position`."""
    return SequenceView(state, np.asarray(page_ids, np.int64), position)
