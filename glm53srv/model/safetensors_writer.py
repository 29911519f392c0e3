"""Writing a safetensors file, with bfloat16 given as bits."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {"<f4": "F32", "<f2": "F16", "<i4": "I32", "<i2": "I16", "<u2": "BF16"}


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor to write. data: float32, float16, int32, int16, or uint16 for the bits of bfloat16."""

    name: str
    data: NDArray[Any]

    @property
    def dtype(self) -> str:
        """The format's name of the element type."""
        return _NAMES[self.data.dtype.newbyteorder("<").str]


def write_safetensors(path: Path, tensors: Sequence[NamedTensor]) -> None:
    """Write all tensors and flush them to the disk. Wide elements go first, so that all data is aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.data.dtype.itemsize)
    header: dict[str, object] = {}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.data.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in ordered:
            file.write(np.ascontiguousarray(tensor.data).tobytes())
        file.flush()
        os.fsync(file.fileno())
