"""AMX's products of K = 3 give the bits of AVX2, whatever the number of rows and the cut of the matrix.

Where the tile unit is not there, its emulation in C (native/src/amx_tiles.h) takes its place; where it is,
both are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cffi_build.build import build
from glm53srv.errors import MachineError
from glm53srv.kernels import Exl3Matrix, Isa, KernelPool, Precision, cpu_features
from glm53srv.native_library import NativeLibrary, open_library
from reference import exl3
from tests.native.builders import as_matrix, as_table, random_experts

ROOT = Path(__file__).resolve().parents[2]

Pools = tuple[KernelPool, KernelPool]
"""One of AMX and one of AVX2, each of two threads."""


@pytest.fixture(scope="module")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    if Isa.AVX512 not in cpu_features().isas:
        pytest.skip("needs AVX512, which this CPU or build lacks")
    package = tmp_path_factory.mktemp("emulated")
    build(ROOT, package, compiler="cc -DGLM53_AMX_EMULATED", mode="abi")
    return open_library(package)


@pytest.fixture(scope="module", params=["unit", "emulated"])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    if request.param == "emulated":
        library = request.getfixturevalue("emulated_library")
    elif Isa.AMX in cpu_features().isas:
        library = open_library()
    else:
        pytest.skip("needs AMX, which this CPU or build lacks")
    with KernelPool(2, Isa.AMX, library=library) as amx, KernelPool(2, Isa.AVX2, library=library) as avx2:
        assert amx.isa is Isa.AMX
        yield amx, avx2


def assert_same_bits(pools: Pools, product: Callable[[KernelPool], NDArray[np.float32]]) -> None:
    actual, expected = (product(pool) for pool in pools)
    np.testing.assert_array_equal(actual, expected)


def random_matrix(in_features: int, out_features: int, bits: float = 3) -> Exl3Matrix:
    return as_matrix(exl3.random_tensors(np.random.default_rng(1), in_features, out_features, bits, "mul1"))


def random_rows(rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(2).normal(size=(rows, width)).astype(np.float32)


@pytest.mark.parametrize("rows", [*range(1, 10), 17])
@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (128, 4224), (4096, 128), (1152, 2176)])
def test_linear_gives_the_bits_of_avx2(pools: Pools, shape: tuple[int, int], rows: int) -> None:
    matrix, x = random_matrix(*shape), random_rows(rows, shape[0])
    assert_same_bits(pools, lambda pool: pool.linear(x, matrix, Precision.FAST16))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shape", [(4096, 2048), (2048, 4096)])
def test_matrices_of_the_models_experts_give_the_bits_of_avx2(
    pools: Pools, shape: tuple[int, int], rows: int
) -> None:
    matrix, x = random_matrix(*shape), random_rows(rows, shape[0])
    assert_same_bits(pools, lambda pool: pool.linear(x, matrix, Precision.FAST16))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("bits", [1, 2, 2.5, 4, 8])
def test_other_widths_give_the_bits_of_avx2(pools: Pools, bits: float, rows: int) -> None:
    matrix, x = random_matrix(384, 256, bits), random_rows(rows, 384)
    assert_same_bits(pools, lambda pool: pool.linear(x, matrix, Precision.FAST16))


def test_experts_shared_by_one_to_four_rows_give_the_bits_of_avx2(pools: Pools) -> None:
    table = as_table(random_experts(3, 5, 512, 384))
    x = random_rows(4, 512)
    picks = np.array([[0, 1, 2, 3], [0, 1, 2, -1], [4, 0, 1, -1], [0, -1, -1, -1]], np.int32)
    weights = np.random.default_rng(4).uniform(size=picks.shape).astype(np.float32)
    assert_same_bits(
        pools, lambda pool: pool.experts(x, table, picks, weights, 10.0, precision=Precision.FAST16)
    )


@pytest.mark.parametrize("rows", range(1, 5))
@pytest.mark.parametrize("sign", [-1, 1])
def test_activations_of_full_scale_give_the_bits_of_avx2(pools: Pools, sign: int, rows: int) -> None:
    # One channel alone transforms into 128 values of +-16383; channel 0 into values of one sign.
    matrix = random_matrix(256, 128)
    x = np.zeros((rows, 256), np.float32)
    x[np.arange(rows), np.arange(rows)] = sign * 1e6
    x[:, 128] = -sign
    assert_same_bits(pools, lambda pool: pool.linear(x, matrix, Precision.FAST16))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(pools: Pools, value: float) -> None:
    x = random_rows(3, 256)
    x[1, 200] = value
    y = pools[0].linear(x, random_matrix(256, 128), Precision.FAST16)
    assert np.isfinite(y[[0, 2]]).all()
    assert not np.isfinite(y[1]).any()


def test_pool_of_amx_is_refused_where_it_is_not_there() -> None:
    if Isa.AMX in cpu_features().isas:
        pytest.skip("this CPU and build have AMX")
    with pytest.raises(MachineError, match="instruction set AMX is not there"):
        KernelPool(1, Isa.AMX)
