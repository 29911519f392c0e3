"""Linear attention as the model calls it: the float64 recurrence, in one piece and cut anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.model.linear import KernelContext
from reference.model import kda_recurrence
from tests.model.goldens import row_errors

HEADS, DIM = 3, 128

TOLERANCE = 2e-5
"""float32 with sums of 128 products, carried through 67 updates of the state; 1e-6 is typical."""


@dataclass(frozen=True)
class Tokens:
    """q, k, v, g: (tokens, heads, d). beta: (tokens, heads)."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    g: NDArray[np.float32]
    beta: NDArray[np.float32]


def draw(count: int, decay: tuple[float, float], seed: int = 0) -> Tokens:
    rng = np.random.default_rng(seed)
    shape = (count, HEADS, DIM)

    def unit() -> NDArray[np.float32]:
        x = rng.normal(size=shape)
        return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), np.float32)

    return Tokens(
        q=unit() * np.float32(DIM**-0.5),
        k=unit(),
        v=rng.normal(size=shape).astype(np.float32),
        g=rng.uniform(*decay, size=shape).astype(np.float32),
        beta=rng.uniform(0, 1, size=(count, HEADS)).astype(np.float32),
    )


def reference(tokens: Tokens, state: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    exact = state.astype(np.float64)
    parts = (part.astype(np.float64) for part in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta))
    q, k, v, g, beta = parts
    return kda_recurrence(q, k, v, g, beta, exact), exact


def start_state() -> NDArray[np.float32]:
    return np.random.default_rng(9).normal(size=(HEADS, DIM, DIM)).astype(np.float32)


def run(
    context: KernelContext, tokens: Tokens, state: NDArray[np.float32], part: slice
) -> NDArray[np.float32]:
    inputs = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    q, k, v, g, beta = (values[None, part] for values in inputs)
    return np.asarray(context.pool.kda([state], q, k, v, g, beta)[0], np.float32)


# The strongest decay a token can have is -5.
@pytest.mark.parametrize("decay", [(-0.1, 0.0), (-5.0, 0.0), (-5.0, -4.99)])
@pytest.mark.parametrize("count", [1, 2, 17, 67])
def test_tokens_follow_the_recurrence(context: KernelContext, count: int, decay: tuple[float, float]) -> None:
    tokens, state = draw(count, decay), start_state()
    expected, expected_state = reference(tokens, state)
    out = run(context, tokens, state, slice(0, count))
    assert row_errors(out, expected).max() < TOLERANCE
    assert row_errors(state, expected_state).max() < TOLERANCE


@pytest.mark.parametrize("cuts", [(1,), (16,), (30, 31), tuple(range(1, 48))])
def test_a_sequence_cut_anywhere_gives_the_same_bits(context: KernelContext, cuts: tuple[int, ...]) -> None:
    tokens, state, whole_state = draw(48, (-3.0, 0.0)), start_state(), start_state()
    whole = run(context, tokens, whole_state, slice(0, 48))
    borders = pairwise((0, *cuts, 48))
    parts = [run(context, tokens, state, slice(begin, end)) for begin, end in borders]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(state, whole_state)
