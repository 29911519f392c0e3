"""EXL3 in float64, written for reading: the oracle of the native kernels.

A matrix W (in, out) is stored as 16 x 16 tiles of 256 packed positions. Each position's weight follows from a
16-bit state, the last 16 bits of a ring of K bits per position; a codebook turns the state into a float16.
Around the decoded matrix stand two Hadamard transforms of width 128 and a scale with sign per channel:

    y = ((x * suh) H  W_hat  H) * svh + bias

K may be 1..8, or 1.5, 2.5, 3.5 (even positions own floor(K) bits, odd ones floor(K) + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float16 = NDArray[np.float16]
Float64 = NDArray[np.float64]
Uint16 = NDArray[np.uint16]

CODEBOOKS = ("default", "mcg", "mul1")
POSITIONS = np.arange(256)


@dataclass(frozen=True, slots=True)
class Exl3Tensors:
    """One quantised linear as a checkpoint stores it.

    trellis: uint16 (in/16, out/16, 16 K). suh: float16 (in,). svh: float16 (out,). bias: float16 (out,) or
    None.
    """

    trellis: Uint16
    suh: Float16
    svh: Float16
    codebook: str
    bias: Float16 | None = None

    @property
    def bits(self) -> float:
        return float(self.trellis.shape[2] / 16)


def bit_ends(bits: float) -> NDArray[np.int64]:
    """Give, for each of the 256 positions, the index of the bit after its last one."""
    return ((POSITIONS + 1) * int(2 * bits)) // 2


def unpack_states(trellis: Uint16) -> Uint16:
    """Turn packed tiles (..., 16 K) into the states (..., 256) in storage order."""
    halves = np.ascontiguousarray(trellis).view(np.uint16)
    lead, total = halves.shape[:-1], halves.shape[-1] * 16
    # 32-bit words, most significant bit first: of each pair of halves the second one comes first.
    swapped = halves.reshape(*lead, -1, 2)[..., ::-1].astype(">u2")
    ring = np.unpackbits(np.ascontiguousarray(swapped).view(np.uint8).reshape(*lead, -1), axis=-1)
    windows = (bit_ends(total / 256)[:, None] - 16 + np.arange(16)) % total
    packed = np.ascontiguousarray(np.packbits(ring[..., windows], axis=-1))
    states: Uint16 = packed.view(">u2")[..., 0].astype(np.uint16)
    return states


def pack_tile(codes: NDArray[np.integer], bits: float) -> Uint16:
    """Pack codes (..., 256), each below 2 ** (its position's bits), into tiles (..., 16 K). Inverse of the
    bit ring.

    Not a quantiser: the state of a position, and so its weight, also holds the codes before it.
    """
    ends = bit_ends(bits)
    widths = np.diff(ends, prepend=0)
    total = int(ends[-1])
    owner = np.repeat(POSITIONS, widths)
    shift = ends[owner] - 1 - np.arange(total)
    ring = ((codes[..., owner].astype(np.int64) >> shift) & 1).astype(np.uint8)
    halves = np.ascontiguousarray(np.packbits(ring, axis=-1)).view(">u2").astype(np.uint16)
    lead = halves.shape[:-1]
    return np.ascontiguousarray(halves.reshape(*lead, -1, 2)[..., ::-1]).reshape(*lead, -1)


def byte_sums(states: Uint16) -> NDArray[np.int64]:
    """Give mul1's sum of the four bytes of state * 0x83DCD12D mod 2 ** 32."""
    product = (states.astype(np.uint64) * np.uint64(0x83DCD12D)).astype(np.uint32)
    sums: NDArray[np.int64] = product[..., None].view(np.uint8).sum(axis=-1, dtype=np.int64)
    return sums


def codebook_values(states: Uint16, codebook: str) -> Float16:
    """Turn states into weights, float16, rounded once."""
    if codebook == "mul1":
        k_inv, k_bias = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        values: Float16 = ((1024.0 + byte_sums(states)) * k_inv + k_bias).astype(np.float16)
        return values
    wide = states.astype(np.uint64)
    product = (
        wide * np.uint64(0xCBAC1FED)
        if codebook == "mcg"
        else wide * np.uint64(89226354) + np.uint64(64248484)
    )
    pair = ((product.astype(np.uint32) & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60))[..., None].view(
        np.float16
    )
    values = pair.astype(np.float64).sum(axis=-1)
    return values.astype(np.float16)


def decode(tensors: Exl3Tensors) -> Float16:
    """Give the rotated-basis weights W_hat (in, out)."""
    values = codebook_values(unpack_states(tensors.trellis), tensors.codebook)
    lane, j = POSITIONS // 8, POSITIONS % 8
    row = (lane % 4) * 2 + j % 2 + 8 * (j // 2 % 2)
    column = lane // 4 + 8 * (j // 4)
    k_tiles, n_tiles = tensors.trellis.shape[:2]
    tiles = np.empty((k_tiles, n_tiles, 16, 16), np.float16)
    tiles[:, :, row, column] = values
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3)).reshape(k_tiles * 16, n_tiles * 16)


def hadamard(x: Float64) -> Float64:
    """Transform each run of 128 entries of the last axis by the orthonormal Sylvester matrix."""
    matrix = np.ones((1, 1))
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    y: Float64 = (x.reshape(-1, 128) @ matrix / np.sqrt(128.0)).reshape(x.shape)
    return y


def linear(x: Float64, tensors: Exl3Tensors) -> Float64:
    """Multiply x (rows, in) into (rows, out)."""
    rotated = hadamard(x * tensors.suh.astype(np.float64)) @ decode(tensors).astype(np.float64)
    y = hadamard(rotated) * tensors.svh.astype(np.float64)
    return y if tensors.bias is None else y + tensors.bias.astype(np.float64)


def gated_expert(
    x: Float64,
    gate: Exl3Tensors,
    up: Exl3Tensors,
    down: Exl3Tensors,
    limit: float,
    *,
    clamps_gate: bool = True,
) -> Float64:
    """down(silu(gate x) * (up x)), clamped by limit > 0 before silu (clamps_gate) or after it."""
    g, u = linear(x, gate), linear(x, up)
    if limit > 0:
        u = np.clip(u, -limit, limit)
        g = np.minimum(g, limit) if clamps_gate else g
    activated = g / (1.0 + np.exp(-g))
    if limit > 0 and not clamps_gate:
        activated = np.minimum(activated, limit)
    return linear(activated * u, down)


def random_tensors(
    rng: np.random.Generator,
    in_features: int,
    out_features: int,
    bits: float,
    codebook: str,
    *,
    bias: bool = False,
) -> Exl3Tensors:
    """Make a random matrix whose products keep the scale of their input."""
    words = int(16 * bits)
    trellis = rng.integers(0, 65536, (in_features // 16, out_features // 16, words), dtype=np.uint16)
    suh = rng.choice([-1.0, 1.0], in_features) * rng.uniform(0.5, 1.5, in_features)
    svh = rng.choice([-1.0, 1.0], out_features) * rng.uniform(0.5, 1.5, out_features) / np.sqrt(in_features)
    values = rng.normal(0.0, 0.1, out_features).astype(np.float16) if bias else None
    return Exl3Tensors(trellis, suh.astype(np.float16), svh.astype(np.float16), codebook, values)
