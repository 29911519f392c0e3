"""The dense kernels against float64, and that a row's bits depend on the row alone.

Tolerance 1e-6 relative RMS: chains of sums are at most 1024 long (scalar) or 128 (AVX2), each step rounding
the sum so far by up to 6e-8; random roundings add up to about 6e-8 * sqrt(1024 / 3) / 2, so 6e-7, or 2e-7.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.kernels import HyperConnection, KernelPool
from tests.native import dense_oracle
from tests.native.builders import relative_rms

TOLERANCE = 1e-6


def _site(seed: int, hidden: int) -> HyperConnection:
    rng = np.random.default_rng(seed)
    return HyperConnection(
        fn=rng.normal(0, 0.02, (24, 4 * hidden)).astype(np.float32),
        base=rng.normal(size=24).astype(np.float32),
        scale=np.array([0.7, 1.1, 1.3], np.float32),
        sinkhorn_iters=20,
        norm_eps=1e-5,
        eps=1e-6,
    )


def _normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _weight(kind: type, *shape: int) -> NDArray[np.float32] | NDArray[np.float16]:
    weight = _normal(2, *shape)
    return weight.astype(np.float16) if kind is np.float16 else weight


@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (3, 256), (17, 264), (33, 8)])
def test_mhc_site_matches_float64(pool: KernelPool, rows: int, hidden: int) -> None:
    x, site = _normal(rows, rows, 4, hidden), _site(rows, hidden)
    results = pool.mhc_site(x, site)
    for actual, expected in zip(results, dense_oracle.mhc_site(x.astype(np.float64), site), strict=True):
        assert relative_rms(actual, expected) < TOLERANCE


def test_mhc_site_row_bits_do_not_depend_on_other_rows(pool: KernelPool) -> None:
    x, site = _normal(1, 40, 4, 512), _site(1, 512)
    together = pool.mhc_site(x, site)
    for row in (0, 7, 15, 16, 39):
        for whole, alone in zip(together, pool.mhc_site(x[row : row + 1], site), strict=True):
            np.testing.assert_array_equal(whole[row : row + 1], alone)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (5, 1032)])
def test_mhc_apply_matches_float64(pool: KernelPool, rows: int, hidden: int) -> None:
    x, y = _normal(1, rows, 4, hidden), _normal(2, rows, hidden)
    post, comb = _normal(3, rows, 4), _normal(4, rows, 4, 4)
    expected = dense_oracle.mhc_apply(*(array.astype(np.float64) for array in (x, y, post, comb)))
    assert relative_rms(pool.mhc_apply(x, y, post, comb), expected) < TOLERANCE


def _kda_inputs(seed: int, sequences: int, tokens: int, heads: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    shape = (sequences, tokens, heads, 128)
    q, k = rng.normal(size=shape), rng.normal(size=shape)
    inputs = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True) * 128**-0.5,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=shape),
        "g": rng.uniform(-5, 0, shape),
        "beta": rng.uniform(size=shape[:3]),
    }
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def test_kda_matches_float64(pool: KernelPool) -> None:
    inputs = _kda_inputs(1, 2, 12, 3)
    states = [_normal(seed, 3, 128, 128) for seed in (5, 6)]
    expected_states = [state.astype(np.float64) for state in states]
    o = pool.kda(states, **inputs)
    for sequence in range(2):
        rows = {name: array[sequence].astype(np.float64) for name, array in inputs.items()}
        expected = dense_oracle.kda(expected_states[sequence], **rows)
        assert relative_rms(o[sequence], expected) < TOLERANCE
        assert relative_rms(states[sequence], expected_states[sequence]) < TOLERANCE


def test_kda_tokens_at_once_give_the_bits_of_single_steps(pool: KernelPool) -> None:
    inputs = _kda_inputs(2, 2, 9, 2)
    at_once, stepwise = ([_normal(seed, 2, 128, 128) for seed in (5, 6)] for _ in range(2))
    o = pool.kda(at_once, **inputs)
    for t in range(9):
        for sequence in range(2):
            part = {
                name: np.ascontiguousarray(array[sequence : sequence + 1, t : t + 1])
                for name, array in inputs.items()
            }
            step = pool.kda([stepwise[sequence]], **part)
            np.testing.assert_array_equal(step[0, 0], o[sequence, t])
    np.testing.assert_array_equal(np.stack(at_once), np.stack(stepwise))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 11])
def test_conv_matches_float64_and_carries_its_state(pool: KernelPool, tokens: int) -> None:
    x, weight = _normal(1, 2, 13, 264), _normal(2, 4, 264)
    states = [_normal(seed, 3, 264) for seed in (3, 4)]
    expected = [
        dense_oracle.conv(state.astype(np.float64), x[s].astype(np.float64), weight.astype(np.float64))
        for s, state in enumerate(states)
    ]
    parts = [
        pool.conv(states, np.ascontiguousarray(x[:, begin : begin + tokens]), weight)
        for begin in range(0, 13, tokens)
    ]
    y = np.concatenate(parts, axis=1)
    assert relative_rms(y, np.stack(expected)) < TOLERANCE
    np.testing.assert_array_equal(np.stack(states), x[:, -3:])


def test_conv_tokens_at_once_give_the_bits_of_single_steps(pool: KernelPool) -> None:
    x, weight = _normal(1, 1, 7, 128), _normal(2, 4, 128)
    at_once, stepwise = ([_normal(3, 3, 128)] for _ in range(2))
    y = pool.conv(at_once, x, weight)
    steps = [pool.conv(stepwise, np.ascontiguousarray(x[:, t : t + 1]), weight) for t in range(7)]
    np.testing.assert_array_equal(np.concatenate(steps, axis=1), y)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(("width", "outs"), [(8, 1), (128, 17), (1032, 64), (4096, 33)])
@pytest.mark.parametrize("rows", [1, 2, 3, 67])
def test_plain_linear_matches_float64(pool: KernelPool, rows: int, width: int, outs: int, kind: type) -> None:
    x, weight = _normal(1, rows, width), _weight(kind, outs, width)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert relative_rms(pool.plain_linear(x, weight), expected) < TOLERANCE


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_plain_linear_row_bits_do_not_depend_on_other_rows(pool: KernelPool, kind: type) -> None:
    x, weight = _normal(1, 67, 2056), _weight(kind, 21, 2056)
    alone = np.concatenate([pool.plain_linear(x[r : r + 1], weight) for r in range(67)])
    for rows in (2, 3, 4, 5, 8, 64, 65, 67):
        np.testing.assert_array_equal(pool.plain_linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 8), (67, 264)])
def test_rms_norm_matches_float64(pool: KernelPool, rows: int, width: int) -> None:
    x, weight = _normal(1, rows, width), _normal(2, width)
    expected = dense_oracle.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-5)
    assert relative_rms(pool.rms_norm(x, weight, 1e-5), expected) < TOLERANCE
    np.testing.assert_array_equal(pool.rms_norm(x[-1:], weight, 1e-5), pool.rms_norm(x, weight, 1e-5)[-1:])


def test_rms_norm_without_weight(pool: KernelPool) -> None:
    x = _normal(1, 2, 128)
    expected = dense_oracle.rms_norm(x.astype(np.float64), np.ones(128), 1e-6)
    assert relative_rms(pool.rms_norm(x, None, 1e-6), expected) < TOLERANCE


def test_dense_bits_do_not_depend_on_thread_count(pool: KernelPool) -> None:
    x, site, weight = _normal(1, 5, 4, 2056), _site(1, 2056), _normal(2, 48, 2056)
    with KernelPool(1, pool.isa) as single:
        for two, one in zip(pool.mhc_site(x, site), single.mhc_site(x, site), strict=True):
            np.testing.assert_array_equal(two, one)
        np.testing.assert_array_equal(pool.plain_linear(x[0], weight), single.plain_linear(x[0], weight))


def test_states_that_do_not_fit_are_refused(pool: KernelPool) -> None:
    inputs = _kda_inputs(1, 2, 1, 1)
    state = np.zeros((1, 128, 128), np.float32)
    with pytest.raises(ValueError, match="share a state"):
        pool.kda([state, state], **inputs)
    with pytest.raises(ValueError, match="1 states do not fit 2 sequences"):
        pool.kda([state], **inputs)
    frozen = state.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pool.kda([state, frozen], **inputs)
