"""Decoded weights, bit for bit: the worked example, every format, and the GPU's own reconstructions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from glm53srv.kernels import Codebook, Exl3Matrix, KernelPool
from reference import exl3
from tests.native.builders import ALL_FORMATS, as_matrix, relative_rms


def _generator(shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Give the worked example's packed words, 40503 i + 12345 mod 65536."""
    count = int(np.prod(shape))
    return ((40503 * np.arange(count) + 12345) % 65536).astype(np.uint16).reshape(shape)


def _tile_matrix(bits: float, codebook: Codebook) -> Exl3Matrix:
    """Repeat the worked example's tile to the smallest matrix there is."""
    trellis = np.broadcast_to(_generator((int(16 * bits),)), (8, 8, int(16 * bits)))
    ones = np.ones(128, np.float16)
    return Exl3Matrix(np.ascontiguousarray(trellis), ones, ones, codebook)


def test_worked_example_tile(pool: KernelPool) -> None:
    w = pool.decode(_tile_matrix(3, Codebook.MUL1))[:16, :16].astype(np.float64)
    at = {(0, 0): -0.7529296875, (1, 0): -0.5703125, (8, 0): -0.252197265625, (9, 8): 1.0263671875}
    at |= {(2, 0): 0.26220703125, (4, 0): 1.046875, (15, 15): 0.282470703125}
    assert {place: w[place] for place in at} == at
    assert w.sum() == 9.026641845703125
    assert (w**2).sum() == pytest.approx(292.56745743, abs=1e-8)
    position = np.arange(1, 257).reshape(16, 16)
    assert (w * position).sum() == pytest.approx(893.06230164, abs=1e-8)


@pytest.mark.parametrize(
    ("codebook", "bits", "total"),
    [
        (Codebook.DEFAULT, 3, 6.4697265625),
        (Codebook.MCG, 3, 13.911376953125),
        (Codebook.MUL1, 1, 9.099388122558594),
        (Codebook.MUL1, 2, -12.03424072265625),
        (Codebook.MUL1, 4, -4.9133148193359375),
        (Codebook.MUL1, 5, 1.548736572265625),
        (Codebook.MUL1, 6, 6.03680419921875),
        (Codebook.MUL1, 7, -16.27685546875),
        (Codebook.MUL1, 8, -17.289108276367188),
        (Codebook.MUL1, 1.5, -17.684326171875),
        (Codebook.MUL1, 2.5, 0.9316558837890625),
        (Codebook.MUL1, 3.5, 0.5221939086914062),
    ],
)
def test_worked_example_other_formats(
    pool: KernelPool, codebook: Codebook, bits: float, total: float
) -> None:
    w = pool.decode(_tile_matrix(bits, codebook))[:16, :16]
    assert w.astype(np.float64).sum() == total


def test_worked_example_linear(pool: KernelPool) -> None:
    c = np.arange(128)
    suh = np.where(c % 2 == 0, 1.0, -1.0) * (0.5 + (c % 8) / 8)
    svh = np.where(c % 3 == 0, -1.0, 1.0) / 16
    x = (((7 * c % 13) - 6) / 8).astype(np.float32)[None]
    trellis = _generator((8, 8, 48))
    matrix = Exl3Matrix(trellis, suh.astype(np.float16), svh.astype(np.float16), Codebook.MUL1)
    w = pool.decode(matrix).astype(np.float64)
    assert w[0, :3].tolist() == [-0.7529296875, -1.166015625, 2.2109375]
    assert w[17, 33] == -0.79345703125
    assert w.sum() == pytest.approx(20.325340271, abs=1e-9)
    y = pool.linear(x, matrix)[0].astype(np.float64)
    expected = [0.04103179, -0.08319702, -0.63803004, -0.29370193, -0.37164107]
    assert y[[0, 1, 2, 64, 127]] == pytest.approx(expected, abs=1e-6)
    assert y.sum() == pytest.approx(-10.245422846, abs=1e-5)
    assert (y**2).sum() == pytest.approx(13.587353333, abs=1e-5)


@pytest.mark.parametrize(("codebook", "bits"), ALL_FORMATS)
def test_every_format_equals_the_oracle_bit_for_bit(pool: KernelPool, codebook: str, bits: float) -> None:
    tensors = exl3.random_tensors(np.random.default_rng(int(2 * bits)), 256, 384, bits, codebook)
    np.testing.assert_array_equal(pool.decode(as_matrix(tensors)), exl3.decode(tensors).astype(np.float32))


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
def test_all_65536_states_equal_the_oracle(pool: KernelPool, codebook: str) -> None:
    # K = 8: the state of position t is codes t-1 and t, so 256 rows of tiles can hold every pair of bytes.
    first, second = np.divmod(np.arange(65536), 256)
    codes = np.stack([first, second], axis=-1).reshape(8, 64, 256)
    trellis = exl3.pack_tile(codes, 8)
    ones = (np.ones(128, np.float16), np.ones(1024, np.float16))
    tensors = exl3.Exl3Tensors(trellis, *ones, codebook)
    assert len(np.unique(exl3.unpack_states(trellis))) == 65536
    np.testing.assert_array_equal(pool.decode(as_matrix(tensors)), exl3.decode(tensors).astype(np.float32))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 1.5, 2.5, 3.5])
def test_packing_codes_and_reading_states_back(bits: float) -> None:
    widths = np.diff(exl3.bit_ends(bits), prepend=0)
    codes = np.random.default_rng(9).integers(0, 2**widths, (3, 256))
    states = exl3.unpack_states(exl3.pack_tile(codes, bits))
    np.testing.assert_array_equal(states & (2**widths - 1), codes)


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_weights_may_lie_at_any_two_byte_boundary(pool: KernelPool, offset: int) -> None:
    tensors = exl3.random_tensors(np.random.default_rng(4), 128, 128, 3, "mul1")
    room = np.zeros(tensors.trellis.size + 8, np.uint16)
    moved = room[offset : offset + tensors.trellis.size].reshape(tensors.trellis.shape)
    moved[:] = tensors.trellis
    matrix = Exl3Matrix(moved, tensors.suh, tensors.svh, Codebook.MUL1)
    x = np.random.default_rng(4).normal(size=(1, 128)).astype(np.float32)
    np.testing.assert_array_equal(pool.decode(matrix), exl3.decode(tensors).astype(np.float32))
    np.testing.assert_array_equal(pool.linear(x, matrix), pool.linear(x, as_matrix(tensors)))


def _shared_oracle(shared_dir: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exl3_ref", shared_dir / "oracles" / "exl3_ref.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("codebook", "bits"), ALL_FORMATS)
def test_every_format_equals_the_independent_oracle(
    pool: KernelPool, shared_dir: Path, codebook: str, bits: float
) -> None:
    tensors = exl3.random_tensors(np.random.default_rng(21), 128, 256, bits, codebook)
    expected = _shared_oracle(shared_dir).decode_inner(tensors.trellis.view(np.int16), bits, codebook)
    np.testing.assert_array_equal(pool.decode(as_matrix(tensors)), expected.astype(np.float32))


def test_checkpoint_weights_equal_the_gpu_reconstructions(pool: KernelPool, shared_dir: Path) -> None:
    folder = shared_dir / "fixtures" / "tiny-random"
    compared = 0
    with (
        safe_open(folder / "exllamav3_h200.safetensors", "np") as gpu,
        safe_open(folder / "checkpoint" / "model.safetensors", "np") as checkpoint,
    ):
        stored, reconstructed = set(checkpoint.keys()), sorted(gpu.keys())
        for name in (key.removeprefix("inner.") for key in reconstructed if key.startswith("inner.")):
            if f"{name}.trellis" not in stored:
                continue  # tensors that the engine fused before it quantised them have no single source
            tensors = {part: checkpoint.get_tensor(f"{name}.{part}") for part in ("trellis", "suh", "svh")}
            matrix = Exl3Matrix(**tensors, codebook=Codebook.MUL1)
            np.testing.assert_array_equal(
                pool.decode(matrix), gpu.get_tensor(f"inner.{name}").astype(np.float32)
            )
            x = gpu.get_tensor(f"lin_x.{name}").astype(np.float32)
            # The GPU multiplies in half precision: 3.5e-4 to 5.6e-4 against float64.
            assert (
                relative_rms(pool.linear(x, matrix), gpu.get_tensor(f"lin_y.{name}").astype(np.float64))
                < 1e-3
            )
            compared += 1
    assert compared >= 6
