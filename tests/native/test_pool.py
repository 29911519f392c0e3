"""The pool as an object: what it refuses, what it tells, and how it ends."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53srv.errors import MachineError
from glm53srv.kernels import Codebook, Exl3Matrix, ExpertTable, Isa, KernelPool, Precision, cpu_features
from glm53srv.native_library import open_library
from reference import exl3
from tests.native.builders import as_matrix, as_table, random_experts

ONES = np.ones(128, np.float16)


def test_auto_takes_the_best_instruction_set() -> None:
    with KernelPool(1) as pool:
        assert pool.isa is max(cpu_features().isas)


def test_scalar_is_always_there() -> None:
    assert Isa.SCALAR in cpu_features().isas


def test_kernels_that_are_not_built_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="not built; build them with: python -m cffi_build"):
        open_library(tmp_path)


def test_library_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "_kernels_abi.so").write_bytes(b"not a library")
    (tmp_path / "_kernels_build.json").write_text('{"cdef": ""}')
    with pytest.raises(MachineError, match=r"_kernels_abi.so: .*python -m cffi_build"):
        open_library(tmp_path)


def test_close_is_idempotent_and_ends_the_pool() -> None:
    pool = KernelPool(2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.hadamard(np.zeros((1, 128), np.float32))


@pytest.mark.parametrize("num_threads", [0, -1])
def test_pool_without_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        KernelPool(num_threads)


def test_workers_are_pinned_to_the_given_cpus() -> None:
    with KernelPool(3, cpus=[0]) as pool:
        assert pool.num_pinned == 2


def test_failing_to_pin_is_told_and_not_fatal() -> None:
    with KernelPool(3, cpus=[100_000]) as pool:
        assert pool.num_pinned == 0
        assert pool.hadamard(np.ones((1, 128), np.float32)).shape == (1, 128)


def test_scratch_grows_to_the_largest_job_and_stays() -> None:
    tensors = exl3.random_tensors(np.random.default_rng(1), 256, 256, 3, "mul1")
    matrix = as_matrix(tensors)
    with KernelPool(2) as pool:
        pool.linear(np.ones((64, 256), np.float32), matrix)
        largest = pool.scratch_bytes
        pool.linear(np.ones((3, 256), np.float32), matrix)
        assert pool.scratch_bytes == largest > 0


def test_second_caller_is_refused_while_a_job_runs() -> None:
    table = as_table(random_experts(1, 2, 1024, 1024))
    x, picks = np.ones((256, 1024), np.float32), np.zeros((256, 1), np.int32)
    weights = np.ones((256, 1), np.float32)
    refused = threading.Event()
    with KernelPool(1, Isa.SCALAR) as pool:

        def occupy() -> None:
            while not refused.is_set():
                with contextlib.suppress(RuntimeError):  # the main thread may hold the pool for a moment
                    pool.experts(x, table, picks, weights, 0.0)

        def call_until_refused() -> None:
            while rival.is_alive():
                pool.hadamard(np.ones((1, 128), np.float32))

        rival = threading.Thread(target=occupy)
        rival.start()
        try:
            with pytest.raises(RuntimeError, match="running another job"):
                call_until_refused()
        finally:
            refused.set()
            rival.join()


@pytest.mark.parametrize("codebook", ["default", "mcg"])
def test_fast16_falls_back_where_it_is_not_implemented(pool: KernelPool, codebook: str) -> None:
    matrix = as_matrix(exl3.random_tensors(np.random.default_rng(1), 128, 128, 3, codebook))
    assert pool.effective_precision(matrix, Precision.FAST16) is Precision.EXACT32


def test_fast16_is_kept_for_mul1(pool: KernelPool) -> None:
    matrix = as_matrix(exl3.random_tensors(np.random.default_rng(1), 128, 128, 3, "mul1"))
    assert pool.effective_precision(matrix, Precision.FAST16) is Precision.FAST16


@pytest.mark.parametrize(
    ("shape", "kind", "codebook", "reason"),
    [
        ((8, 8, 47), np.int16, Codebook.MUL1, "47 words per tile"),
        ((8, 8, 144), np.int16, Codebook.MUL1, "144 words per tile"),
        ((8, 8, 24), np.int16, Codebook.DEFAULT, "codebook DEFAULT does not have"),
        ((9, 8, 48), np.int16, Codebook.MUL1, "144 in features"),
        ((8, 0, 48), np.int16, Codebook.MUL1, "0 out features"),
        ((8, 8, 48), np.int32, Codebook.MUL1, "must be int16"),
    ],
)
def test_matrix_that_does_not_fit_says_why(
    shape: tuple[int, ...], kind: type, codebook: Codebook, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Exl3Matrix(np.zeros(shape, kind), ONES, ONES, codebook)


@pytest.mark.parametrize("name", ["suh", "svh", "bias"])
def test_vector_of_the_wrong_kind_is_named(name: str) -> None:
    wrong: Any = np.ones(128, np.float32)
    suh, svh, bias = (wrong if name == each else ONES for each in ("suh", "svh", "bias"))
    with pytest.raises(ValueError, match=f"{name} must be contiguous float16"):
        Exl3Matrix(np.zeros((8, 8, 48), np.int16), suh, svh, Codebook.MUL1, bias)


def test_matrix_tells_its_size() -> None:
    matrix = Exl3Matrix(np.zeros((8, 16, 40), np.int16), ONES, np.ones(256, np.float16), Codebook.MUL1)
    assert (matrix.in_features, matrix.out_features, matrix.bits) == (128, 256, 2.5)
    assert matrix.num_bytes == 8 * 16 * 40 * 2 + 2 * (128 + 256)


def test_table_names_the_expert_that_does_not_fit() -> None:
    wide, square = random_experts(1, 1, 256, 128)[0], random_experts(1, 1, 128, 128)[0]
    fitting = tuple(map(as_matrix, wide))
    with pytest.raises(ValueError, match="down of expert 1 has shape"):
        ExpertTable([(fitting[0], fitting[1], fitting[2]), (fitting[0], fitting[1], as_matrix(square[2]))])


def test_picks_outside_the_table_are_refused(pool: KernelPool) -> None:
    table = as_table(random_experts(1, 2, 128, 128))
    x, weights = np.ones((1, 128), np.float32), np.ones((1, 1), np.float32)
    for pick in (2, -2):
        with pytest.raises(ValueError, match="a pick is neither"):
            pool.experts(x, table, np.full((1, 1), pick, np.int32), weights, 0.0)


def test_input_of_the_wrong_width_is_refused(pool: KernelPool) -> None:
    matrix = as_matrix(exl3.random_tensors(np.random.default_rng(1), 256, 128, 3, "mul1"))
    with pytest.raises(ValueError, match=r"expected float32 \(rows, 256\)"):
        pool.linear(np.ones((1, 128), np.float32), matrix)


def test_no_rows_give_no_rows(pool: KernelPool) -> None:
    matrix = as_matrix(exl3.random_tensors(np.random.default_rng(1), 256, 128, 3, "mul1"))
    assert pool.linear(np.empty((0, 256), np.float32), matrix).shape == (0, 128)
