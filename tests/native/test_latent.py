"""Latent attention against float64: what is read, what comes out, and that a row's bits are its own.

Tolerance 2e-6 relative RMS: products of up to 512 channels and softmax sums over up to 600 tokens, each
rounding by up to 6e-8, and exponentials within 2 units of the last place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.kernels import Isa, KernelPool
from glm53srv.latent_kernel import LatentIndex, LatentPages, latent_attention
from tests.native import latent_oracle
from tests.native.builders import relative_rms

TOLERANCE = 2e-6
PAGE, KPOOL = 16, 4


@dataclass(frozen=True)
class Case:
    """One sequence's cache and queries. Rows that belong to nobody are NaN."""

    queries: NDArray[np.float32]
    pages: LatentPages
    index: LatentIndex

    def tokens(self) -> NDArray[np.float32]:
        """Give the latents in order, (tokens, latent)."""
        table = self.pages.latents.reshape(-1, PAGE, self.pages.latents.shape[1])
        return table[self.pages.page_ids].reshape(-1, table.shape[2])

    def pools(self) -> NDArray[np.float32]:
        table = self.index.pooled.reshape(-1, PAGE // KPOOL, self.index.pooled.shape[1])
        return table[self.pages.page_ids].reshape(-1, table.shape[2])

    def run(self, pool: KernelPool, *, has_index: bool = True) -> NDArray[np.float32]:
        index = self.index if has_index else None
        return latent_attention(pool, self.queries, self.pages, self.scale, index)

    @property
    def scale(self) -> float:
        """Give what makes scores of normal numbers normal."""
        return float(self.queries.shape[2] ** -0.5)

    def expected(self, *, has_index: bool = True) -> NDArray[np.float64]:
        latents, pooled = self.tokens().astype(np.float64), self.pools().astype(np.float64)
        out = []
        for row in range(len(self.queries)):
            num_visible = self.pages.position + row + 1
            tokens = np.arange(num_visible)
            if has_index:
                scaled = self.index.queries[row].astype(np.float64) * self.index.scale
                weights = self.index.weights[row].astype(np.float64)
                tokens = latent_oracle.visible_tokens(
                    scaled, weights, pooled, num_visible, KPOOL, self.index.topk_pools
                )
            out.append(
                latent_oracle.attend(self.queries[row].astype(np.float64), latents[tokens], self.scale)
            )
        return np.stack(out)


def make_case(
    seed: int,
    rows: int,
    position: int,
    *,
    heads: int = 4,
    latent: int = 128,
    topk_pools: int = 6,
    index_heads: int = 3,
) -> Case:
    rng = np.random.default_rng(seed)
    num_tokens, dim = position + rows, 32
    num_pages = -(-num_tokens // PAGE)
    latents = np.full(((num_pages + 2) * PAGE, latent), np.nan, np.float32)
    pooled = np.full(((num_pages + 2) * PAGE // KPOOL, dim), np.nan, np.float32)
    page_ids = rng.permutation(num_pages + 2)[:num_pages]
    for token in range(num_tokens):
        latents[page_ids[token // PAGE] * PAGE + token % PAGE] = rng.normal(size=latent)
    for each in range(num_tokens // KPOOL):
        per_page = PAGE // KPOOL
        pooled[page_ids[each // per_page] * per_page + each % per_page] = rng.normal(size=dim)
    index = LatentIndex(
        queries=rng.normal(size=(rows, index_heads, dim)).astype(np.float32),
        weights=rng.normal(size=(rows, index_heads)).astype(np.float32),
        pooled=pooled,
        kpool=KPOOL,
        topk_pools=topk_pools,
        scale=dim**-0.5,
    )
    queries = rng.normal(size=(rows, heads, latent)).astype(np.float32)
    return Case(queries, LatentPages(latents, page_ids, PAGE, position), index)


@pytest.mark.parametrize(
    ("rows", "position"), [(1, 0), (5, 0), (40, 0), (1, 22), (1, 23), (1, 24), (1, 27), (33, 20), (3, 597)]
)
@pytest.mark.parametrize("has_index", [True, False])
def test_attention_matches_float64(pool: KernelPool, rows: int, position: int, has_index: bool) -> None:
    case = make_case(rows + position, rows, position)
    actual = case.run(pool, has_index=has_index)
    assert relative_rms(actual, case.expected(has_index=has_index)) < TOLERANCE


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 15, 16, 17, 23, 64])
@pytest.mark.parametrize("latent", [8, 24, 512])
def test_every_number_of_heads_and_width(pool: KernelPool, heads: int, latent: int) -> None:
    case = make_case(heads, 3, 61, heads=heads, latent=latent)
    assert relative_rms(case.run(pool), case.expected()) < TOLERANCE


@pytest.mark.parametrize("num_tokens", range(1, 68))
def test_every_number_of_tokens_read(pool: KernelPool, num_tokens: int) -> None:
    case = make_case(num_tokens, 1, num_tokens - 1)
    assert relative_rms(case.run(pool, has_index=False), case.expected(has_index=False)) < TOLERANCE


@pytest.mark.parametrize("topk_pools", [1, 2, 11, 60, 149, 150])
def test_every_number_of_pools(pool: KernelPool, topk_pools: int) -> None:
    case = make_case(topk_pools, 2, 600, topk_pools=topk_pools)
    assert relative_rms(case.run(pool), case.expected()) < TOLERANCE


def read_tokens(pool: KernelPool, scores: list[float], num_visible: int, topk_pools: int) -> list[int]:
    """Give the tokens that a query reads, by their marks: equal weights over rows that name their token."""
    case = make_case(1, 1, num_visible - 1, latent=128, topk_pools=topk_pools, index_heads=1)
    marks = np.full_like(case.pages.latents, np.nan)
    pooled = np.full_like(case.index.pooled, np.nan)
    for token in range(num_visible):
        place = case.pages.page_ids[token // PAGE] * PAGE + token % PAGE
        marks[place] = np.arange(128) == token
    for each, score in enumerate(scores):
        place = case.pages.page_ids[each // (PAGE // KPOOL)] * (PAGE // KPOOL) + each % (PAGE // KPOOL)
        pooled[place] = 0.0
        pooled[place, 0] = score
    query = np.zeros_like(case.index.queries)
    query[0, 0, 0] = 1.0
    index = replace(case.index, queries=query, weights=np.ones((1, 1), np.float32), pooled=pooled)
    pages = replace(case.pages, latents=marks)
    mixed = latent_attention(pool, np.zeros_like(case.queries), pages, 1.0, index)[0, 0]
    assert np.ptp(mixed[mixed > 0]) < 1e-6
    return np.flatnonzero(mixed > 0).tolist()


@pytest.mark.parametrize(("num_visible", "tail"), [(12, []), (13, [12]), (15, [12, 13, 14])])
def test_the_tail_is_read_and_a_token_in_a_lost_pool_is_not(
    pool: KernelPool, num_visible: int, tail: list[int]
) -> None:
    assert read_tokens(pool, [3, 2, 1], num_visible, 2) == [0, 1, 2, 3, 4, 5, 6, 7, *tail]


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        ([1, 5, 3, 4], 2, [1, 3]),
        ([0, 0, 0, 0], 2, [0, 1]),
        ([2, 1, 1, 1, 3], 3, [0, 1, 4]),
        ([-1, -2, 7, -3], 2, [0, 2]),  # what is below 0 counts as 0, and the first of equals wins
        ([1, 1, 1, 1, 1, 1, 1, 2], 7, [0, 1, 2, 3, 4, 5, 7]),
    ],
)
def test_equal_pools_are_taken_from_the_first_on(
    pool: KernelPool, scores: list[float], count: int, expected: list[int]
) -> None:
    tokens = [pool_id * KPOOL + i for pool_id in expected for i in range(KPOOL)]
    assert read_tokens(pool, scores, KPOOL * len(scores), count) == tokens


def test_random_scores_with_many_ties_choose_as_a_stable_sort_does(pool: KernelPool) -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        scores = rng.integers(0, 4, rng.integers(2, 31)).astype(float)
        count = int(rng.integers(1, len(scores)))
        chosen = latent_oracle.best_pools(scores, count)
        tokens = [int(pool_id) * KPOOL + i for pool_id in chosen for i in range(KPOOL)]
        assert read_tokens(pool, scores.tolist(), KPOOL * len(scores), count) == tokens


def test_a_row_has_the_same_bits_alone_and_in_a_chunk(pool: KernelPool) -> None:
    case = make_case(9, 30, 41, heads=20)
    together = case.run(pool)
    for row in (0, 1, 13, 29):
        alone = Case(
            case.queries[row : row + 1],
            replace(case.pages, position=case.pages.position + row),
            replace(
                case.index,
                queries=case.index.queries[row : row + 1],
                weights=case.index.weights[row : row + 1],
            ),
        )
        np.testing.assert_array_equal(alone.run(pool), together[row : row + 1])


def test_threads_do_not_change_bits(pool: KernelPool) -> None:
    case = make_case(10, 2, 300, heads=40)
    with KernelPool(3, pool.isa) as other:
        np.testing.assert_array_equal(case.run(pool), case.run(other))


def test_scores_that_are_no_numbers_show(pool: KernelPool) -> None:
    case = make_case(11, 1, 599)
    case.index.queries[:] = np.nan
    assert np.isnan(case.run(pool)).all()


def test_large_scores_do_not_overflow(pool: KernelPool) -> None:
    case = make_case(12, 4, 50)
    large = replace(case, queries=case.queries * np.float32(300))
    assert relative_rms(large.run(pool), large.expected()) < 1e-4  # scores of 1e3 have lost four digits


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make_case(13, 2, 40)
    with KernelPool(1, Isa.AUTO) as pool:
        with pytest.raises(ValueError, match="pages"):
            replace(case, pages=replace(case.pages, page_ids=case.pages.page_ids[:1])).run(pool)
        with pytest.raises(ValueError, match="pages"):
            replace(case, pages=replace(case.pages, page_ids=case.pages.page_ids + 100)).run(pool)
        with pytest.raises(ValueError, match="index weights"):
            replace(case, index=replace(case.index, weights=case.index.weights[:1])).run(pool)
        with pytest.raises(ValueError, match="multiples"):
            latent_attention(
                pool,
                np.zeros((1, 2, 12), np.float32),
                replace(case.pages, latents=np.zeros((PAGE * 8, 12), np.float32)),
                1.0,
            )
