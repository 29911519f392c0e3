"""The linears of the model as callables, quantised or plain, over one pool of native kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import CheckpointError
from glm53srv.kernels import Codebook, Exl3Matrix, ExpertTable, KernelPool, Precision
from glm53srv.model.checkpoint import Checkpoint, CodebookName, LinearNeed, PlainLinear, QuantizedLinear
from glm53srv.model.ops import F32

_CODEBOOKS = {
    CodebookName.DEFAULT: Codebook.DEFAULT,
    CodebookName.MCG: Codebook.MCG,
    CodebookName.MUL1: Codebook.MUL1,
}


BATCH_INVARIANT_ROWS = 8
"""Up to so many rows in a call, the bits of a row depend on that row alone (native/include/glm53_kernels.h).

Decoding relies on it: a sequence gives the same tokens alone and in a batch.
"""


class Linear(Protocol):
    """x float32 (rows, in) -> float32 (rows, out). Batch invariant up to BATCH_INVARIANT_ROWS rows."""

    def __call__(self, x: F32) -> F32: ...


@dataclass(frozen=True, slots=True)
class KernelContext:
    """What every linear computes with. The pool belongs to the engine thread."""

    pool: KernelPool
    precision: Precision = Precision.EXACT32


class Exl3Linear:
    """A quantised linear; the weights stay in the mapped file."""

    def __init__(self, context: KernelContext, matrix: Exl3Matrix) -> None:
        self._context = context
        self._matrix = matrix

    def __call__(self, x: F32) -> F32:
        return self._context.pool.linear(x, self._matrix, self._context.precision)


class FloatLinear:
    """A plain linear. weight: float32 or float16 (out, in), contiguous; multiplied in float32."""

    def __init__(self, context: KernelContext, weight: NDArray[Any]) -> None:
        self._context = context
        self._weight = weight

    def __call__(self, x: F32) -> F32:
        return self._context.pool.plain_linear(x, self._weight)


class GatedMlps:
    """Gated feed-forward networks of equal shape that share a table: routed experts, or a single MLP.

    y = down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit)); limit 0 switches the clamps off.
    """

    def __init__(self, context: KernelContext, table: ExpertTable, limit: float) -> None:
        self._context = context
        self._table = table
        self._limit = limit

    def __call__(self, x: F32, picks: NDArray[np.int32], weights: F32) -> F32:
        """Sum weights (rows, k) times the networks picks (rows, k) of x (rows, hidden), in the order of k."""
        return self._context.pool.experts(
            x, self._table, picks, weights, self._limit, precision=self._context.precision
        )


def load_linear(context: KernelContext, checkpoint: Checkpoint, need: LinearNeed) -> Linear:
    """Give a linear in the form that the checkpoint has."""
    stored = checkpoint.linear(need)
    if isinstance(stored, PlainLinear):
        return FloatLinear(context, stored.weight)
    return Exl3Linear(context, to_matrix(stored))


def load_mlps(
    context: KernelContext, checkpoint: Checkpoint, needs: Iterable[Sequence[LinearNeed]], limit: float
) -> GatedMlps:
    """Give the networks of `needs`, one (gate, up, down) each, as one table."""
    experts = []
    for gate, up, down in needs:
        experts.append(tuple(to_matrix(checkpoint.quantized(need)) for need in (gate, up, down)))
    return GatedMlps(context, ExpertTable([(e[0], e[1], e[2]) for e in experts]), limit)


def to_matrix(stored: QuantizedLinear) -> Exl3Matrix:
    """Give the kernels' view of a stored linear. Raises CheckpointError when the kernels refuse it."""
    try:
        return Exl3Matrix(
            stored.trellis, stored.suh, stored.svh, _CODEBOOKS[stored.codebook], bias=stored.bias
        )
    except ValueError as error:
        raise CheckpointError(f"{stored.key}: {error}") from error
