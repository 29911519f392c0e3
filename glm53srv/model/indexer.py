"""The indexer of a latent attention layer: which tokens a query reads once the context is long.

Keys are pooled: four tokens make one pool, with softmax weights per channel. A query reads the best pools
among the complete ones it can see, and the tail, the newest tokens that are in no complete pool. While no
more pools are complete than it may read, it reads everything, and no score is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glm53srv.latent_kernel import LatentIndex
from glm53srv.model.config import IndexerConfig
from glm53srv.model.linear import Linear
from glm53srv.model.norm import LayerNorm
from glm53srv.model.ops import F32, softmax
from glm53srv.model.state import PagedRows, PoolTail, SequenceView

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The parts of one indexer. position_bias: float32 (kpool, head_dim)."""

    query: Linear
    key: Linear
    gate: Linear
    head_weights: Linear
    key_norm: LayerNorm
    position_bias: F32


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """queries: (rows, heads, head_dim). weights: (rows, heads), signed."""

    queries: F32
    weights: F32


class Indexer:
    """One layer's indexer. Stateless: pooled keys live in the paged cache, unfinished pools in the slots."""

    def __init__(self, config: IndexerConfig, weights: IndexerWeights) -> None:
        self._config = config
        self._weights = weights

    @property
    def kpool(self) -> int:
        """Tokens per pool."""
        return self._config.kpool

    def is_dense(self, num_visible: int) -> bool:
        """Tell whether a query that sees this many tokens reads all of them."""
        return num_visible // self._config.kpool <= self._config.topk_pools

    def keys(self, x: F32) -> tuple[F32, F32]:
        """Give the raw key and gate rows of tokens x (rows, hidden), each (rows, head_dim)."""
        return self._weights.key_norm(self._weights.key(x)), self._weights.gate(x)

    def store(self, keys: F32, gates: F32, tail: PoolTail, pooled: PagedRows, sequence: SequenceView) -> None:
        """Add the next tokens of a sequence: pool what is complete, keep the rest in the slot's tail."""
        kpool = self._config.kpool
        num_held = sequence.position % kpool
        keys = np.concatenate([tail.keys[:num_held], keys])
        gates = np.concatenate([tail.gates[:num_held], gates])
        num_pools, num_left = divmod(len(keys), kpool)
        if num_pools:
            complete = num_pools * kpool
            pools = pool_keys(keys[:complete], gates[:complete], self._weights.position_bias)
            pooled.write(sequence.page_ids, sequence.position // kpool, pools)
        tail.keys[:num_left] = keys[len(keys) - num_left :]
        tail.gates[:num_left] = gates[len(gates) - num_left :]

    def queries(self, x: F32, latent_queries: F32) -> IndexQueries:
        """Give what scores are made of, from x (rows, hidden) and the layer's (rows, q_lora_rank)."""
        config, weights = self._config, self._weights
        queries = weights.query(latent_queries).reshape(len(x), config.num_heads, config.head_dim)
        return IndexQueries(queries, weights.head_weights(x) * np.float32(config.num_heads**-0.5))

    def selection(self, index: IndexQueries, rows: slice, pooled: PagedRows) -> LatentIndex:
        """Give what the attention kernel needs to select tokens for some rows of a call.

        It selects for one query at a time, so that a position is selected alike in a chunk of any length and
        in a decode step.
        """
        return LatentIndex(
            queries=index.queries[rows],
            weights=index.weights[rows],
            pooled=pooled.rows,
            kpool=self._config.kpool,
            topk_pools=self._config.topk_pools,
            scale=self._config.head_dim**-0.5,
        )


def pool_keys(keys: F32, gates: F32, position_bias: F32) -> F32:
    """Merge each kpool rows of keys, gates (pools * kpool, d) by softmax over the gates; gives (pools, d)."""
    kpool, width = position_bias.shape
    weights = softmax((gates.reshape(-1, kpool, width) + position_bias).swapaxes(1, 2)).swapaxes(1, 2)
    return np.asarray((weights * keys.reshape(-1, kpool, width)).sum(axis=1, dtype=np.float32), np.float32)
