"""What the kernels' callers must pass; each check raises ValueError that names the array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


def as_rows(x: Float32, width: int | None) -> Float32:
    """Check type and shape; give x, or a contiguous copy of it if it is strided."""
    if x.dtype != np.float32 or x.ndim != 2 or (width is not None and x.shape[1] != width):
        wanted = "(rows, width)" if width is None else f"(rows, {width})"
        raise ValueError(f"expected float32 {wanted}, not {x.dtype} {x.shape}")
    return np.ascontiguousarray(x)


def shape_of(array: Float32, name: str, num_dimensions: int) -> tuple[int, ...]:
    """Give the shape if it has so many dimensions."""
    if array.ndim != num_dimensions:
        raise ValueError(f"{name} must have {num_dimensions} dimensions, not shape {array.shape}")
    return array.shape


def expect(array: Float32, name: str, shape: tuple[int, ...]) -> None:
    """Require contiguous float32 of this shape."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous float32 {shape}, not {array.dtype} {array.shape}")
