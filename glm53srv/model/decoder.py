"""The text model: embedding, blocks over residual streams, head.

Two ways through a block: prefill (many tokens of one sequence) and decode (one token of each of several).
Both take the streams float32 (rows, 4, hidden) and give new ones, so that a caller can pause between any two
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.model.checkpoint import bfloat16_to_float32
from glm53srv.model.config import ModelConfig
from glm53srv.model.hyper_connection import HyperConnection
from glm53srv.model.kda import KdaAttention
from glm53srv.model.linear import Linear
from glm53srv.model.mla import MlaAttention, MlaCache
from glm53srv.model.mlp import Mlp
from glm53srv.model.ops import F32, rms_norm
from glm53srv.model.state import PAGE_TOKENS, PagedCache, SequenceState, SequenceView, view_of


class Embedding:
    """Rows by token id. table: (vocab, hidden) float32, float16 or the bits of bfloat16 (uint16), mapped."""

    def __init__(self, table: NDArray[Any]) -> None:
        self._table = table

    def __call__(self, token_ids: Sequence[int]) -> F32:
        rows = self._table[np.asarray(token_ids, np.int64)]
        return bfloat16_to_float32(rows) if rows.dtype == np.uint16 else rows.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: an attention site, then a feed-forward site."""

    attention_site: HyperConnection
    attention_norm: F32
    attention: KdaAttention | MlaAttention
    mlp_site: HyperConnection
    mlp_norm: F32
    mlp: Mlp


class Decoder:
    """The whole model. Immutable; the sequences' states and the cache come with each call.

    The kernels behind it serve one call at a time: one thread at a time may use a decoder.
    """

    def __init__(
        self, config: ModelConfig, embedding: Embedding, blocks: Sequence[Block], norm: F32, head: Linear
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._blocks = tuple(blocks)
        self._norm = norm
        self._head = head

    def embed(self, token_ids: Sequence[int]) -> F32:
        """Give the streams (rows, 4, hidden) of tokens before the first block."""
        rows = self._embedding(token_ids)
        return np.repeat(rows[:, None, :], self.config.hc.num_streams, axis=1)

    def prefill_block(self, layer: int, streams: F32, sequence: SequenceView, cache: PagedCache) -> F32:
        """Run one block over the next tokens of one sequence, whose state in this layer is moved on."""
        block = self._blocks[layer]
        mix = block.attention_site.mix(streams)
        x = rms_norm(mix.read, block.attention_norm, self.config.rms_norm_eps)
        if isinstance(block.attention, KdaAttention):
            y = block.attention.prefill(x, sequence.state.kda[layer])
        else:
            y = block.attention.prefill(x, _mla_cache(layer, sequence, cache))
        return self._feed_forward(block, block.attention_site.write(streams, mix, y))

    def decode_block(
        self, layer: int, streams: F32, sequences: Sequence[SequenceView], cache: PagedCache
    ) -> F32:
        """Run one block over one token of each sequence; row i belongs to sequences[i]."""
        block = self._blocks[layer]
        mix = block.attention_site.mix(streams)
        x = rms_norm(mix.read, block.attention_norm, self.config.rms_norm_eps)
        if isinstance(block.attention, KdaAttention):
            y = block.attention.decode(x, [sequence.state.kda[layer] for sequence in sequences])
        else:
            y = block.attention.decode(x, [_mla_cache(layer, sequence, cache) for sequence in sequences])
        return self._feed_forward(block, block.attention_site.write(streams, mix, y))

    def logits(self, streams: F32) -> F32:
        """Give the logits (rows, vocab) of the tokens whose streams (rows, 4, hidden) left the last block."""
        mean = streams.mean(axis=1, dtype=np.float32)
        return self._head(rms_norm(mean, self._norm, self.config.rms_norm_eps))

    def block(self, layer: int, streams: F32) -> F32:
        """Run one block over a whole sequence from its start, streams (rows, 4, hidden). For checks."""
        sequence, cache = self._fresh_sequence(len(streams))
        return self.prefill_block(layer, streams, sequence, cache)

    def forward(self, token_ids: Sequence[int]) -> F32:
        """Give the logits (tokens, vocab) at every position of one sequence, teacher-forced. For checks."""
        sequence, cache = self._fresh_sequence(len(token_ids))
        streams = self.embed(token_ids)
        for layer in range(self.config.num_layers):
            streams = self.prefill_block(layer, streams, sequence, cache)
        return self.logits(streams)

    def _fresh_sequence(self, num_tokens: int) -> tuple[SequenceView, PagedCache]:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        state = SequenceState(self.config)
        return view_of(state, range(num_pages), 0), PagedCache(self.config, num_pages)

    def _feed_forward(self, block: Block, streams: F32) -> F32:
        mix = block.mlp_site.mix(streams)
        y = block.mlp(rms_norm(mix.read, block.mlp_norm, self.config.rms_norm_eps))
        return block.mlp_site.write(streams, mix, y)


def _mla_cache(layer: int, sequence: SequenceView, cache: PagedCache) -> MlaCache:
    return MlaCache(cache.layers[layer], sequence.state.tails[layer], sequence)
