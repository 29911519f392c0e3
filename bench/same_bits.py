"""Whether the instruction sets of this machine give the same bits where they must: FAST16, see the C header.

The suite tests the same; this is for a machine that only has the package and the bench, such as a borrowed
one whose CPU has what the developer's lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from glm53srv.kernels import Codebook, Exl3Matrix, ExpertTable, KernelPool, Precision
from reference import exl3

SHAPES = ((128, 128), (128, 4224), (4096, 128), (1152, 2176), (4096, 2048), (2048, 4096))
ROWS = (1, 2, 3, 4, 5, 8, 13)
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, LIMIT = 1024, 512, 12, 8, 10.0


def compare_bits(pools: Sequence[KernelPool], bits: int) -> tuple[int, list[str]]:
    """Compare every pool with the first one; give the number of products compared, and which differ.

    bits: per weight.
    """
    expected: dict[str, NDArray[np.float32]] = {}
    num_products, wrong = 0, []
    for pool in pools:
        for name, y in _products(pool, bits):
            num_products += pool is not pools[0]
            if not np.array_equal(y, expected.setdefault(name, y)):
                wrong.append(f"{pool.isa.name}: {name}")
    return num_products, wrong


def _products(pool: KernelPool, bits: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Compute the same products each time: matrices of every cut, then experts shared by 1 to 4 rows."""
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        matrix = _random_matrix(rng, shape, bits)
        x = rng.normal(size=(max(ROWS), shape[0])).astype(np.float32)
        for rows in ROWS:
            y = pool.linear(x[:rows], matrix, Precision.FAST16)
            yield f"{shape[0]} x {shape[1]} times {rows}", y
    table = ExpertTable([_random_expert(rng, bits) for _ in range(NUM_EXPERTS)])
    for rows in range(1, 5):
        x = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
        picks = np.array([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(rows)], np.int32)
        weights = rng.uniform(size=picks.shape).astype(np.float32)
        y = pool.experts(x, table, picks, weights, LIMIT, precision=Precision.FAST16)
        yield f"experts times {rows}", y


def _random_expert(rng: np.random.Generator, bits: int) -> tuple[Exl3Matrix, Exl3Matrix, Exl3Matrix]:
    gate = _random_matrix(rng, (HIDDEN, INTERMEDIATE), bits)
    up = _random_matrix(rng, (HIDDEN, INTERMEDIATE), bits)
    return gate, up, _random_matrix(rng, (INTERMEDIATE, HIDDEN), bits)


def _random_matrix(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> Exl3Matrix:
    tensors = exl3.random_tensors(rng, *shape, bits, "mul1")
    return Exl3Matrix(tensors.trellis, tensors.suh, tensors.svh, Codebook.MUL1)
