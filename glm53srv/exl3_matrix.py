"""EXL3-quantised matrices and tables of experts, as the native kernels take them: descriptors of borrowed
arrays.

Nothing here needs the compiled library: a descriptor is a numpy structure with the layout of the C one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float16 = NDArray[np.float16]

MATRIX_STRUCT = np.dtype(
    [
        ("trellis", np.uintp),
        ("suh", np.uintp),
        ("svh", np.uintp),
        ("bias", np.uintp),
        ("in_features", np.int32),
        ("out_features", np.int32),
        ("bits_x2", np.int32),
        ("codebook", np.int32),
    ],
    align=True,
)
"""glm53_matrix; its size is compared with the library's when a pool is made."""


class Codebook(enum.IntEnum):
    """How a 16-bit state becomes a weight; the checkpoint says which by a tensor `mcg` or `mul1`, or none."""

    DEFAULT = 0
    MCG = 1
    MUL1 = 2


class Exl3Matrix:
    """One EXL3-quantised matrix W (in, out), y = x W. Immutable; keeps its arrays alive, copies none of them.

    trellis: int16 or uint16 (in/16, out/16, words), the packed tiles as in the checkpoint; suh: float16
    (in,); svh: float16 (out,); bias: float16 (out,) or None. All C-contiguous; read-only memory maps are
    fine. Raises ValueError with one line that says which of them does not fit.
    """

    def __init__(
        self,
        trellis: NDArray[np.int16] | NDArray[np.uint16],
        suh: Float16,
        svh: Float16,
        codebook: Codebook,
        bias: Float16 | None = None,
    ) -> None:
        if trellis.dtype not in (np.dtype(np.int16), np.dtype(np.uint16)) or trellis.ndim != 3:
            raise ValueError(f"trellis must be int16 of 3 dimensions, not {trellis.dtype} {trellis.shape}")
        words = trellis.shape[2]
        self.in_features = trellis.shape[0] * 16
        self.out_features = trellis.shape[1] * 16
        for name, size in (("in", self.in_features), ("out", self.out_features)):
            if size == 0 or size % 128:
                raise ValueError(f"trellis has {size} {name} features, not a positive multiple of 128")
        bits_x2 = words // 8
        has_bits = words % 8 == 0 and (
            (bits_x2 % 2 == 0 and 2 <= bits_x2 <= 16) or (codebook is Codebook.MUL1 and bits_x2 in (3, 5, 7))
        )
        if not has_bits:
            raise ValueError(
                f"trellis has {words} words per tile, which codebook {codebook.name} does not have"
            )
        for name, vector, size in (("suh", suh, self.in_features), ("svh", svh, self.out_features)):
            _check_vector(name, vector, size)
        if bias is not None:
            _check_vector("bias", bias, self.out_features)
        if not trellis.flags.c_contiguous:
            raise ValueError("trellis is not C-contiguous")
        self.codebook = codebook
        self.bits = bits_x2 / 2
        self.num_bytes = trellis.nbytes + suh.nbytes + svh.nbytes + (0 if bias is None else bias.nbytes)
        self._arrays = (trellis, suh, svh, bias)
        self.descriptor = np.zeros(1, MATRIX_STRUCT)
        """glm53_matrix, (1,); read-only."""
        bias_address = 0 if bias is None else bias.ctypes.data
        addresses = (trellis.ctypes.data, suh.ctypes.data, svh.ctypes.data, bias_address)
        self.descriptor[0] = (*addresses, self.in_features, self.out_features, bits_x2, int(codebook))
        self.descriptor.flags.writeable = False


class ExpertTable:
    """The experts of one layer as one C array, built once. Keeps the matrices alive; copies no weights.

    experts: (gate, up, down) each; gate and up (hidden, intermediate), down (intermediate, hidden), the same
    shapes for all. Raises ValueError with one line that names the first expert that does not fit.
    """

    def __init__(self, experts: Sequence[tuple[Exl3Matrix, Exl3Matrix, Exl3Matrix]]) -> None:
        if not experts:
            raise ValueError("a table needs at least one expert")
        self.hidden = experts[0][0].in_features
        self.intermediate = experts[0][0].out_features
        inward, outward = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        for index, (gate, up, down) in enumerate(experts):
            for name, matrix, shape in (("gate", gate, inward), ("up", up, inward), ("down", down, outward)):
                if (matrix.in_features, matrix.out_features) != shape:
                    found = (matrix.in_features, matrix.out_features)
                    raise ValueError(f"{name} of expert {index} has shape {found}, not {shape}")
        self._experts = tuple(experts)
        self.descriptor = np.concatenate([matrix.descriptor for expert in experts for matrix in expert])
        """glm53_expert (num_experts,), seen as glm53_matrix (3 * num_experts,); read-only."""
        self.descriptor.flags.writeable = False

    def __len__(self) -> int:
        return len(self._experts)

    def moved(self, records: NDArray[np.uintp], offsets: tuple[int, int, int]) -> ExpertTable:
        """Give a table whose first experts have their packed tiles elsewhere: a pointer table.

        records: addresses, uintp (count,), count <= len(self); the tiles of gate, up and down of expert i lie
        at records[i] plus the offsets. Scales stay, and so do the experts after the first count. The caller
        keeps that memory alive and filled.
        """
        table = object.__new__(ExpertTable)
        table.hidden, table.intermediate, table._experts = self.hidden, self.intermediate, self._experts
        table.descriptor = self.descriptor.copy()
        trellis = table.descriptor["trellis"].reshape(-1, 3)
        trellis[: len(records)] = records[:, None] + np.array(offsets, np.uintp)
        table.descriptor.flags.writeable = False
        return table

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for expert in self._experts for matrix in expert)


def _check_vector(name: str, vector: Float16, size: int) -> None:
    if vector.dtype != np.float16 or vector.shape != (size,) or not vector.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous float16 ({size},), not {vector.dtype} {vector.shape}")
