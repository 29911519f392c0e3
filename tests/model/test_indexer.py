"""When reading is dense, and how pools are made across chunk borders. What is chosen: tests/native."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glm53srv.model.config import IndexerConfig, load_model_config
from glm53srv.model.indexer import KEY_NORM_EPS, Indexer, IndexerWeights, pool_keys
from glm53srv.model.norm import LayerNorm
from glm53srv.model.ops import F32
from glm53srv.model.state import PagedRows, PoolTail, SequenceState, SequenceView, view_of

KPOOL, WIDTH = 4, 8


def no_linear(x: F32) -> F32:
    raise AssertionError("this test multiplies nothing")


POSITION_BIAS = np.random.default_rng(1).normal(size=(KPOOL, WIDTH)).astype(np.float32)


def make_indexer(topk_tokens: int) -> Indexer:
    weights = IndexerWeights(
        query=no_linear,
        key=no_linear,
        gate=no_linear,
        head_weights=no_linear,
        key_norm=LayerNorm(np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32), KEY_NORM_EPS),
        position_bias=POSITION_BIAS,
    )
    return Indexer(IndexerConfig(num_heads=2, head_dim=WIDTH, topk_tokens=topk_tokens, kpool=KPOOL), weights)


def test_pool_keys_weigh_each_channel_by_itself() -> None:
    rng = np.random.default_rng(3)
    keys, gates = (rng.normal(size=(3 * KPOOL, WIDTH)).astype(np.float32) for _ in range(2))
    bias = rng.normal(size=(KPOOL, WIDTH)).astype(np.float32)
    pooled = pool_keys(keys, gates, bias)
    for pool in range(3):
        for channel in range(WIDTH):
            rows = slice(pool * KPOOL, (pool + 1) * KPOOL)
            share = np.exp((gates[rows, channel] + bias[:, channel]).astype(np.float64))
            expected = (share / share.sum()) @ keys[rows, channel]
            assert pooled[pool, channel] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("num_visible", "is_dense"), [(1, True), (8, True), (11, True), (12, False), (13, False)]
)
def test_reading_is_dense_until_too_many_pools_are_complete(num_visible: int, is_dense: bool) -> None:
    assert make_indexer(topk_tokens=8).is_dense(num_visible) is is_dense


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 22])
def test_pools_do_not_depend_on_chunk_borders(random_model_dir: Path, chunk: int) -> None:
    indexer, rng = make_indexer(topk_tokens=8), np.random.default_rng(4)
    keys, gates = (rng.normal(size=(22, WIDTH)).astype(np.float32) for _ in range(2))
    state = SequenceState(load_model_config(random_model_dir))
    tail = PoolTail(np.zeros((KPOOL, WIDTH), np.float32), np.zeros((KPOOL, WIDTH), np.float32))
    pooled = PagedRows(num_pages=3, rows_per_page=2, width=WIDTH)
    pages = (2, 0, 1)  # not in order: a row's place follows from the page ids alone
    for first in range(0, 22, chunk):
        sequence: SequenceView = view_of(state, pages, first)
        indexer.store(keys[first : first + chunk], gates[first : first + chunk], tail, pooled, sequence)
    expected = np.concatenate(
        [pool_keys(keys[p : p + KPOOL], gates[p : p + KPOOL], POSITION_BIAS) for p in range(0, 20, KPOOL)]
    )
    assert np.array_equal(pooled.read(np.array(pages), 5), expected)
    assert np.array_equal(tail.keys[:2], keys[20:])


def test_paged_rows_read_neighbouring_pages_without_a_copy() -> None:
    rows = PagedRows(num_pages=4, rows_per_page=2, width=3)
    values = np.arange(18, dtype=np.float32).reshape(6, 3)
    for pages in ([1, 2, 3], [3, 0, 2]):
        ids = np.array(pages)
        rows.write(ids, 0, values[:1])
        rows.write(ids, 1, values[1:])
        assert np.array_equal(rows.read(ids, 5), values[:5])
        assert np.array_equal(rows.take(ids, np.array([5, 0, 3])), values[[5, 0, 3]])
    assert np.shares_memory(rows.read(np.array([1, 2]), 3), rows.read(np.array([1]), 1))
    assert not np.shares_memory(rows.read(np.array([3, 0]), 3), rows.read(np.array([3]), 1))
