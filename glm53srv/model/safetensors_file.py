"""One memory-mapped safetensors file.

The format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length n, n bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end)}}`, then the data, offsets counted from its first byte. The
header is parsed here rather than by the safetensors package because its Python interface copies every tensor,
and expert weights must stay the file's own pages: they are most of the checkpoint and are read in place.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import CheckpointError

_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

# bfloat16 has no numpy dtype: its bits are handed out as uint16.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. dtype: the format's name. offset: bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def item_bytes(self) -> int:
        """Size of an element."""
        return _DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * self.item_bytes


class SafetensorsFile:
    """A mapped file; arrays from it are read-only views that keep the mapping alive.

    Raises CheckpointError, naming file and tensor, when the file is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                start = file.read(len(_LFS_POINTER))
                if start == _LFS_POINTER:
                    raise CheckpointError(
                        f"{path}: is a git-lfs pointer, not the weights; run `git lfs pull` beside it"
                    )
                if size < _HEADER_LENGTH.size:
                    raise CheckpointError(f"{path}: truncated, {size} bytes; fetch the file again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self.tensors: dict[str, TensorInfo] = _parse_header(path, self._map, size)

    def view(self, info: TensorInfo) -> NDArray[Any]:
        """Give a tensor without copying; bfloat16 comes as its bits in uint16."""
        dtype = _DTYPES[info.dtype]
        count = prod(info.shape)
        if count == 0:
            return np.empty(info.shape, dtype)
        return np.frombuffer(self._map, dtype, count, info.offset).reshape(info.shape)


def _parse_header(path: Path, data: mmap.mmap, size: int) -> dict[str, TensorInfo]:
    (length,) = _HEADER_LENGTH.unpack_from(data)
    begin = _HEADER_LENGTH.size + length
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: not a safetensors file (header of {length} bytes)")
    if begin > size:
        raise CheckpointError(
            f"{path}: truncated in its header ({size} of {begin} bytes); fetch the file again"
        )
    try:
        header = json.loads(data[_HEADER_LENGTH.size : begin])
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file (its header is not JSON)") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is not an object)")
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _parse_entry(path, name, entry, begin, size)
    return tensors


def _parse_entry(path: Path, name: str, entry: object, data_begin: int, size: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: {name}: malformed header entry")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {name}: unknown dtype {dtype!r}")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name}: malformed header entry")
    info = TensorInfo(name, dtype, tuple(shape), data_begin + offsets[0])
    if offsets[1] - offsets[0] != info.num_bytes:
        held = offsets[1] - offsets[0]
        raise CheckpointError(f"{path}: {name}: holds {held} bytes, its shape {shape} needs {info.num_bytes}")
    end = info.offset + info.num_bytes
    if end > size:
        raise CheckpointError(f"{path}: truncated: {name} ends at byte {end} of {size}; fetch the file again")
    return info


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
