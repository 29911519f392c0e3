"""Latent attention without positions: one cached row per token serves all heads as key and value.

The up-projection of keys is applied to the query and that of values to the result ("absorbed"), so that
attention runs over the cached rows themselves and nothing is expanded per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53srv.latent_kernel import LatentPages, latent_attention
from glm53srv.model.config import MlaConfig
from glm53srv.model.indexer import Indexer, IndexQueries
from glm53srv.model.linear import KernelContext, Linear
from glm53srv.model.norm import RmsNorm
from glm53srv.model.ops import F32
from glm53srv.model.state import PAGE_TOKENS, LayerPages, PoolTail, SequenceView


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

    def __init__(
        self, context: KernelContext, config: MlaConfig, weights: MlaWeights, indexer: Indexer
    ) -> None:
        self._pool = context.pool
        self._config = config
        self._weights = weights
        self._indexer = indexer
        self._scale = config.nope_head_dim**-0.5

    def prefill(self, x: F32, cache: MlaCache) -> F32:
        """Advance one sequence by the tokens x (rows, hidden); gives (rows, hidden)."""
        rows, weights = len(x), self._weights
        inputs = self._inputs(x)
        self._store(inputs, slice(0, rows), cache)
        absorbed = inputs.queries.swapaxes(0, 1) @ weights.key_up
        queries = np.ascontiguousarray(absorbed.swapaxes(0, 1))
        index = None
        if not self._indexer.is_dense(cache.sequence.position + rows):
            index = self._indexer.queries(x, inputs.latent_queries)
        mixed = self._attend(queries, index, slice(0, rows), cache)
        values = mixed.swapaxes(0, 1) @ weights.value_up
        return weights.output(np.ascontiguousarray(values.swapaxes(0, 1)).reshape(rows, -1))

    def decode(self, x: F32, caches: Sequence[MlaCache]) -> F32:
        """Advance len(caches) sequences by one token each, x (rows, hidden); gives (rows, hidden)."""
        rows, weights = len(x), self._weights
        inputs = self._inputs(x)
        index: IndexQueries | None = None
        if not all(self._indexer.is_dense(cache.sequence.position + 1) for cache in caches):
            index = self._indexer.queries(x, inputs.latent_queries)
        heads = np.empty((rows, self._config.num_heads, self._config.v_head_dim), np.float32)
        for row, cache in enumerate(caches):
            one = slice(row, row + 1)
            self._store(inputs, one, cache)
            # Row by row: a product over all rows would give bits that depend on their number.
            absorbed = np.matmul(inputs.queries[row][:, None, :], weights.key_up)[:, 0]
            mixed = self._attend(absorbed[None], index, one, cache)[0]
            heads[row] = np.matmul(mixed[:, None, :], weights.value_up)[:, 0]
        return weights.output(heads.reshape(rows, -1))

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

    def _attend(self, queries: F32, index: IndexQueries | None, rows: slice, cache: MlaCache) -> F32:
        """Attend from absorbed queries (rows, heads, latent) over what each selects; gives the same shape.

        rows: those of the queries within index.
        """
        pages, sequence = cache.pages, cache.sequence
        place = LatentPages(pages.latent.rows, sequence.page_ids, PAGE_TOKENS, sequence.position)
        selection = None if index is None else self._indexer.selection(index, rows, pages.pooled)
        return latent_attention(self._pool, queries, place, self._scale, selection)
