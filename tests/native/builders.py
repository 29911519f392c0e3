"""Random matrices for kernel tests, in the oracle's form and in the kernels'."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53srv.kernels import Codebook, Exl3Matrix, ExpertTable, Precision
from reference import exl3

ALL_FORMATS = [
    *((codebook, float(bits)) for codebook in exl3.CODEBOOKS for bits in range(1, 9)),
    *(("mul1", bits) for bits in (1.5, 2.5, 3.5)),
]
"""Every (codebook, bits per weight) that the format has."""

TOLERANCE = {Precision.EXACT32: 1e-6, Precision.FAST16: 5e-4}
"""Largest relative RMS error against float64.

EXACT32: each output is a sum of at most 32 blocks of 128 products, each block summed by 4 or more lanes:
about sqrt(128 / 4 + 32) roundings of 6e-8, so 5e-7 for one product; the transforms and a second product stay
within 1e-6. FAST16: rounding the weights to f16 is left out, 2.2e-4 for one product and 3.8e-4 for a gated
expert.
"""


def relative_rms(actual: NDArray[np.floating], expected: NDArray[np.float64]) -> float:
    """Give |actual - expected| / |expected|; NaN in, NaN out, which no tolerance accepts."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def as_matrix(tensors: exl3.Exl3Tensors) -> Exl3Matrix:
    codebook = Codebook[tensors.codebook.upper()]
    return Exl3Matrix(tensors.trellis, tensors.suh, tensors.svh, codebook, tensors.bias)


Expert = tuple[exl3.Exl3Tensors, exl3.Exl3Tensors, exl3.Exl3Tensors]


def random_experts(
    seed: int, count: int, hidden: int, intermediate: int, bits: float = 3, codebook: str = "mul1"
) -> list[Expert]:
    rng = np.random.default_rng(seed)
    return [
        (
            exl3.random_tensors(rng, hidden, intermediate, bits, codebook),
            exl3.random_tensors(rng, hidden, intermediate, bits, codebook),
            exl3.random_tensors(rng, intermediate, hidden, bits, codebook),
        )
        for _ in range(count)
    ]


def as_table(experts: list[Expert]) -> ExpertTable:
    return ExpertTable([(as_matrix(gate), as_matrix(up), as_matrix(down)) for gate, up, down in experts])


def expert_sum(
    x: NDArray[np.float32],
    experts: list[Expert],
    picks: NDArray[np.int32],
    weights: NDArray[np.float32],
    limit: float,
    *,
    clamps_gate: bool = True,
) -> NDArray[np.float64]:
    """Compute in float64 what KernelPool.experts computes."""
    y = np.zeros(x.shape)
    for expert in range(len(experts)):
        rows, slots = np.nonzero(picks == expert)
        if len(rows):
            out = exl3.gated_expert(
                x[rows].astype(np.float64), *experts[expert], limit, clamps_gate=clamps_gate
            )
            np.add.at(y, rows, out * weights[rows, slots].astype(np.float64)[:, None])
    return y
