"""The text model: embedding, blocks over residual streams, head.

Two ways through a block: prefill (many tokens of one sequence) and decode (one token of each of several).
Both take the streams float32 (rows, 4, hidden) and give new ones, so that a caller can pause between any two
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.kernels import HyperConnection
from glm53srv.model.checkpoint import bfloat16_to_float32
from glm53srv.model.config import ModelConfig
from glm53srv.model.kda import KdaAttention
from glm53srv.model.linear import KernelContext, Linear
from glm53srv.model.mla import MlaAttention, MlaCache
from glm53srv.model.mlp import Mlp
from glm53srv.model.norm import RmsNorm
from glm53srv.model.ops import F32
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
    attention_norm: RmsNorm
    attention: KdaAttention | MlaAttention
    mlp_site: HyperConnection
    mlp_norm: RmsNorm
    mlp: Mlp


class Decoder:
    """The whole model. Immutable; the sequences' states and the cache come with each call.

    The kernels behind it serve one call at a time: one thread at a time may use a decoder.
    """

    def __init__(
        self,
        context: KernelContext,
        config: ModelConfig,
        embedding: Embedding,
        blocks: Sequence[Block],
        norm: RmsNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self._pool = context.pool
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

        def attend(x: F32) -> F32:
            attention = self._blocks[layer].attention
            if isinstance(attention, KdaAttention):
                return attention(x, [sequence.state.kda[layer]])
            return attention.prefill(x, _mla_cache(layer, sequence, cache))

        return self._run(self._blocks[layer], streams, attend)

    def decode_block(
        self, layer: int, streams: F32, sequences: Sequence[SequenceView], cache: PagedCache
    ) -> F32:
        """Run one block over one token of each sequence; row i belongs to sequences[i]."""

        def attend(x: F32) -> F32:
            attention = self._blocks[layer].attention
            if isinstance(attention, KdaAttention):
                return attention(x, [sequence.state.kda[layer] for sequence in sequences])
            return attention.decode(x, [_mla_cache(layer, sequence, cache) for sequence in sequences])

        return self._run(self._blocks[layer], streams, attend)

    def logits(self, streams: F32) -> F32:
        """Give the logits (rows, vocab) of the tokens whose streams (rows, 4, hidden) left the last block."""
        mean = streams.mean(axis=1, dtype=np.float32)
        return self._head(self._norm(mean))

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

    def _run(self, block: Block, streams: F32, attend: Callable[[F32], F32]) -> F32:
        """Run both sites of a block: each reads one mixture of the streams and writes back into all."""
        pool = self._pool
        read, post, comb = pool.mhc_site(streams, block.attention_site)
        y = attend(block.attention_norm(read))
        streams = pool.mhc_apply(streams, y, post, comb)
        read, post, comb = pool.mhc_site(streams, block.mlp_site)
        y = block.mlp(block.mlp_norm(read))
        return pool.mhc_apply(streams, y, post, comb)


def _mla_cache(layer: int, sequence: SequenceView, cache: PagedCache) -> MlaCache:
    return MlaCache(cache.layers[layer], sequence.state.tails[layer], sequence)
