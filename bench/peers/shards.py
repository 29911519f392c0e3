"""Where every tensor of a model of random weights lies in its safetensors files, planned before one is drawn.

    model-00001-of-00008.safetensors   | length | header | 4-byte tensors | 2-byte tensors |
    model-00002-of-00008.safetensors   ...

The places are known first, so that many threads can write at once. The format is that of
model/safetensors_file.py, which reads it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53srv.engine.cuda.synthetic_plan import TensorSpec, tensor_specs
from glm53srv.model.config import ModelConfig
from glm53srv.model.pack import draw_rule
from glm53srv.model.safetensors_file import TensorInfo

MAX_SHARD_BYTES = 5_000_000_000

_KINDS = {"trellis": "I16", "suh": "F16", "svh": "F16", "mul1": "I32"}
_PLAIN = {"bf16": "BF16", "f2": "F16", "f4": "F32"}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file. head: what stands before the data."""

    file_name: str
    head: bytes
    places: tuple[TensorInfo, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(place.num_bytes for place in self.places)


def stored_dtype(name: str, spec: TensorSpec) -> str:
    """Give the format's name of a tensor's elements, as SyntheticTensors makes them."""
    return _KINDS.get(spec.kind) or _PLAIN[draw_rule(name, spec.shape).dtype]


def plan_shards(config: ModelConfig, max_bytes: int = MAX_SHARD_BYTES) -> list[Shard]:
    """Share the model's tensors out over files of at most max_bytes of data, in the order of the layers.

    A tensor that is larger has a file of its own.
    """
    groups: list[list[TensorInfo]] = [[]]
    room = max_bytes
    for name, spec in tensor_specs(config):
        place = TensorInfo(name, stored_dtype(name, spec), spec.shape, 0)
        if place.num_bytes > room and groups[-1]:
            groups.append([])
            room = max_bytes
        groups[-1].append(place)
        room -= place.num_bytes
    return [_lay_out(group, index, len(groups)) for index, group in enumerate(groups)]


def _lay_out(places: Sequence[TensorInfo], index: int, count: int) -> Shard:
    # Wide elements first: then all of them are aligned to their size.
    ordered = sorted(places, key=lambda place: -place.item_bytes)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for place in ordered:
        end = offset + place.num_bytes
        header[place.name] = {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return Shard(
        f"model-{index + 1:05d}-of-{count:05d}.safetensors", head, tuple(_placed(ordered, len(head)))
    )


def _placed(places: Sequence[TensorInfo], offset: int) -> Iterator[TensorInfo]:
    for place in places:
        yield TensorInfo(place.name, place.dtype, place.shape, offset)
        offset += place.num_bytes


class ShardFile:
    """An open file of a shard at its full size; `write` may be called by many threads at once."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        """Create the file. Raises OSError."""
        self.path = directory / shard.file_name
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.truncate(self._descriptor, shard.num_bytes)
        _write_all(self._descriptor, np.frombuffer(shard.head, np.uint8), 0)

    def write(self, place: TensorInfo, data: NDArray[np.uint8]) -> None:
        """Write a tensor's bytes, uint8 (place.num_bytes,), contiguous. Raises OSError; ValueError for
        another size."""
        if data.shape != (place.num_bytes,):
            raise ValueError(f"{place.name} has {place.num_bytes} bytes, {data.shape} were given")
        _write_all(self._descriptor, data, place.offset)

    def close(self) -> None:
        """Close the file; nothing is forced to the disk."""
        os.close(self._descriptor)


def _write_all(descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
    done = 0
    while done < len(data):  # a write of more than 2 GiB comes back short
        done += os.pwrite(descriptor, data[done:].data, offset + done)
