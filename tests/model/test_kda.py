"""Linear attention: blocks of tokens, single steps and the float64 recurrence agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.model.kda import kda_blocks, kda_step
from reference.model import kda_recurrence
from tests.model.goldens import row_errors

HEADS, DIM = 3, 128
BLOCK = 16

TOLERANCE = 2e-5
"""float32 with sums of 128 products and 16 dependent rows per block; 1e-6 is typical."""


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


def run_blocks(tokens: Tokens, state: NDArray[np.float32], part: slice) -> NDArray[np.float32]:
    inputs = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    q, k, v, g, beta = (values[part] for values in inputs)
    return kda_blocks(q, k, v, g, beta, state, BLOCK)


# The strongest decay a token can have is -5; a block of it spans e^-80, more than float32 can divide by.
@pytest.mark.parametrize(
    "decay", [(-0.1, 0.0), (-5.0, 0.0), (-5.0, -4.99)], ids=["slow", "mixed", "strongest"]
)
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 67])
def test_blocks_follow_the_recurrence(count: int, decay: tuple[float, float]) -> None:
    tokens, state = draw(count, decay), start_state()
    expected, expected_state = reference(tokens, state)
    out = run_blocks(tokens, state, slice(0, count))
    assert out.shape == (count, HEADS, DIM)
    assert row_errors(out, expected).max() < TOLERANCE
    assert row_errors(state, expected_state).max() < TOLERANCE


def test_steps_follow_the_recurrence() -> None:
    tokens, state = draw(20, (-5.0, 0.0)), start_state()
    expected, expected_state = reference(tokens, state)
    for i in range(20):
        out = kda_step(tokens.q[i], tokens.k[i], tokens.v[i], tokens.g[i], tokens.beta[i], state)
        assert row_errors(out[None], expected[i][None]).max() < TOLERANCE
    assert row_errors(state, expected_state).max() < TOLERANCE


@pytest.mark.parametrize("cut", [1, 16, 30, 47])
def test_a_sequence_cut_anywhere_gives_the_same(cut: int) -> None:
    tokens, state = draw(48, (-3.0, 0.0)), start_state()
    expected, expected_state = reference(tokens, state)
    outs = [run_blocks(tokens, state, part) for part in (slice(0, cut), slice(cut, 48))]
    assert row_errors(np.concatenate(outs), expected).max() < TOLERANCE
    assert row_errors(state, expected_state).max() < TOLERANCE
