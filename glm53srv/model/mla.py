"""Latent attention without positions: one cached row per token serves all heads as key and value.

The up-projection of keys is applied to the query and that of values to the result ("absorbed"), so that
attention runs over the cached rows themselves and nothing is expanded per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53srv.model.config import MlaConfig
from glm53srv.model.indexer import Indexer, IndexQueries
from glm53srv.model.linear import Linear
from glm53srv.model.norm import RmsNorm
from glm53srv.model.ops import F32, softmax
from glm53srv.model.state import LayerPages, PoolTail, SequenceView

_QUERY_BLOCK = 64
"""Queries whose scores are held at once in dense prefill."""


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """The parts of one layer. key_up: (heads, nope, latent), value_up: (heads, latent, v); float32 like the
    norms."""

    query_a: Linear
    query_norm: RmsNorm
    query_b: Linear
    latent: Linear
    latent_norm: RmsNorm
    key_up: F32
    value_up: F32
    output: Linear


@dataclass(frozen=True, slots=True)
class MlaCache:
    """One sequence's memory in one layer."""

    pages: LayerPages
    tail: PoolTail
    sequence: SequenceView


@dataclass(frozen=True, slots=True)
class _Inputs:
    """queries: (rows, heads, nope). latent_queries: (rows, q_lora_rank). latents: (rows, kv_lora_rank).
    keys, gates: (rows, index_head_dim)."""

    queries: F32
    latent_queries: F32
    latents: F32
    keys: F32
    gates: F32


class MlaAttention:
    """One latent attention layer with its indexer. Stateless: caches come with each call."""

    def __init__(self, config: MlaConfig, weights: MlaWeights, indexer: Indexer) -> None:
        self._config = config
        self._weights = weights
        self._indexer = indexer
        self._scale = np.float32(config.nope_head_dim**-0.5)

    def prefill(self, x: F32, cache: MlaCache) -> F32:
        """Advance one sequence by the tokens x (rows, hidden); gives (rows, hidden)."""
        rows, begin = len(x), cache.sequence.position
        inputs = self._inputs(x)
        self._store(inputs, slice(0, rows), cache)
        latents = cache.pages.latent.read(cache.sequence.page_ids, begin + rows)
        num_dense = sum(self._indexer.is_dense(begin + row + 1) for row in range(rows))
        heads = np.empty((rows, self._config.num_heads, self._config.v_head_dim), np.float32)
        for first in range(0, num_dense, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, num_dense)
            heads[first:last] = self._attend_dense(inputs.queries[first:last], latents, begin + first)
        if num_dense < rows:
            index = self._indexer.queries(x[num_dense:], inputs.latent_queries[num_dense:])
            for row in range(num_dense, rows):
                heads[row] = self._attend_one(
                    inputs.queries[row], index, row - num_dense, begin + row + 1, cache
                )
        return self._weights.output(heads.reshape(rows, -1))

    def decode(self, x: F32, caches: Sequence[MlaCache]) -> F32:
        """Advance len(caches) sequences by one token each, x (rows, hidden); gives (rows, hidden)."""
        rows = len(x)
        inputs = self._inputs(x)
        index: IndexQueries | None = None
        if not all(self._indexer.is_dense(cache.sequence.position + 1) for cache in caches):
            index = self._indexer.queries(x, inputs.latent_queries)
        heads = np.empty((rows, self._config.num_heads, self._config.v_head_dim), np.float32)
        for row, cache in enumerate(caches):
            self._store(inputs, slice(row, row + 1), cache)
            heads[row] = self._attend_one(inputs.queries[row], index, row, cache.sequence.position + 1, cache)
        return self._weights.output(heads.reshape(rows, -1))

    def _inputs(self, x: F32) -> _Inputs:
        weights = self._weights
        latent_queries = weights.query_norm(weights.query_a(x))
        queries = weights.query_b(latent_queries)
        keys, gates = self._indexer.keys(x)
        return _Inputs(
            queries=queries.reshape(len(x), self._config.num_heads, self._config.nope_head_dim),
            latent_queries=latent_queries,
            latents=weights.latent_norm(weights.latent(x)),
            keys=keys,
            gates=gates,
        )

    def _store(self, inputs: _Inputs, rows: slice, cache: MlaCache) -> None:
        sequence = cache.sequence
        cache.pages.latent.write(sequence.page_ids, sequence.position, inputs.latents[rows])
        self._indexer.store(inputs.keys[rows], inputs.gates[rows], cache.tail, cache.pages.pooled, sequence)

    def _attend_dense(self, queries: F32, latents: F32, begin: int) -> F32:
        """Attend causally from queries (rows, heads, nope) at `begin` and on; gives (rows, heads, v)."""
        rows, num_heads, _ = queries.shape
        visible = latents[: begin + rows]
        absorbed = queries.swapaxes(0, 1) @ self._weights.key_up
        scores: F32 = np.matmul(absorbed.reshape(num_heads * rows, -1), visible.T, dtype=np.float32)
        scores = scores.reshape(num_heads, rows, -1)
        scores *= self._scale
        scores[:, np.arange(begin + rows) > begin + np.arange(rows)[:, None]] = -np.inf
        mixed = softmax(scores).reshape(num_heads * rows, -1) @ visible
        values = mixed.reshape(num_heads, rows, -1) @ self._weights.value_up
        return np.asarray(values.swapaxes(0, 1), np.float32)

    def _attend_one(
        self, query: F32, index: IndexQueries | None, index_row: int, num_visible: int, cache: MlaCache
    ) -> F32:
        """Attention of one query (heads, nope) over what its indexer selects; gives (heads, v)."""
        page_ids, pages = cache.sequence.page_ids, cache.pages
        if index is None or self._indexer.is_dense(num_visible):
            latents = pages.latent.read(page_ids, num_visible)
        else:
            pooled = pages.pooled.read(page_ids, num_visible // self._indexer.kpool)
            positions = self._indexer.select(
                index.queries[index_row], index.weights[index_row], pooled, num_visible
            )
            latents = pages.latent.take(page_ids, positions)
        absorbed = np.matmul(query[:, None, :], self._weights.key_up)[:, 0]
        weights = softmax((absorbed @ latents.T) * self._scale)
        mixed = weights @ latents
        return np.asarray(np.matmul(mixed[:, None, :], self._weights.value_up)[:, 0], np.float32)
