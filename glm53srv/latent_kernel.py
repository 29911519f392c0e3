"""Latent attention over a paged cache by the native kernels: which tokens a query reads, and what it gets.

The rules, and the order of sums, stand in native/include/glm53_kernels.h (glm53_latent_job).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.array_checks import Float32, expect, shape_of
from glm53srv.kernels import KernelPool
from glm53srv.native_library import open_library


@dataclass(frozen=True, slots=True)
class LatentPages:
    """A sequence's place in the cache of one layer; float32, C-contiguous, borrowed for the call.

    latents: (pages * page_tokens, latent). page_ids: int64, the sequence's pages in order. position: tokens
    before the first query; the rows of the queries' own tokens are in the cache already.
    """

    latents: Float32
    page_ids: NDArray[np.int64]
    page_tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class LatentIndex:
    """The indexer of a call; float32, C-contiguous.

    queries: (rows, heads, dim). weights: (rows, heads), signed. pooled: (pages * page_tokens / kpool, dim).
    scale: factor of a product before its negative part is cut off.
    """

    queries: Float32
    weights: Float32
    pooled: Float32
    kpool: int
    topk_pools: int
    scale: float


def latent_attention(
    pool: KernelPool, queries: Float32, pages: LatentPages, scale: float, index: LatentIndex | None = None
) -> Float32:
    """Attend from queries (rows, heads, latent), absorbed, at consecutive positions; gives the same shape.

    index: None reads every visible token. Raises ValueError for shapes that do not fit, and for too few pages
    or pages outside the cache.
    """
    rows, heads, latent = shape_of(queries, "queries", 3)
    expect(queries, "queries", (rows, heads, latent))
    num_pages = len(pages.latents) // pages.page_tokens
    expect(pages.latents, "latents", (num_pages * pages.page_tokens, latent))
    num_needed = -(-(pages.position + rows) // pages.page_tokens)
    ids = np.ascontiguousarray(pages.page_ids[:num_needed], np.int64)
    if len(ids) < num_needed or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_pages):
        raise ValueError(f"{num_needed} pages of {num_pages} are needed, not {pages.page_ids}")
    ffi = open_library().ffi
    y = np.empty_like(queries)
    job = ffi.new("glm53_latent_job *")
    job.queries, job.latents, job.y = (_floats(ffi, each) for each in (queries, pages.latents, y))
    job.page_ids = ffi.cast("int64_t *", ids.ctypes.data)
    job.rows, job.position, job.heads, job.latent = rows, pages.position, heads, latent
    job.page_tokens, job.kpool, job.scale = pages.page_tokens, 1, scale
    if index is not None:
        _set_index(ffi, job, index, rows, num_pages * pages.page_tokens)
    if y.size:
        pool.latent_attention(job)
    return y


def _set_index(ffi: Any, job: Any, index: LatentIndex, rows: int, num_tokens: int) -> None:
    _, heads, dim = shape_of(index.queries, "index queries", 3)
    expect(index.queries, "index queries", (rows, heads, dim))
    expect(index.weights, "index weights", (rows, heads))
    expect(index.pooled, "pooled", (num_tokens // index.kpool, dim))
    job.index_queries = _floats(ffi, index.queries)
    job.index_weights = _floats(ffi, index.weights)
    job.pooled = _floats(ffi, index.pooled)
    job.index_heads, job.index_dim, job.index_scale = heads, dim, index.scale
    job.kpool, job.topk_pools = index.kpool, index.topk_pools


def _floats(ffi: Any, array: Float32) -> Any:
    return ffi.cast("float *", array.ctypes.data)
