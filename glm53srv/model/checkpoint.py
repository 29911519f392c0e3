"""A directory of safetensors files as one set of tensors, and the linears made of them.

Every *.safetensors of the directory is read: the index file of published checkpoints names only some of them.
Nothing is copied but bfloat16 and the few tensors that are asked for as float32.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import CheckpointError
from glm53srv.model.safetensors_file import SafetensorsFile, TensorInfo

MCG_MULTIPLIER = 0xCBAC1FED
MUL1_MULTIPLIER = 0x83DCD12D
"""Values of the scalars whose presence selects a codebook (EXL3 format)."""

FLOATS = ("F32", "F16", "BF16")
TILE = 16
HADAMARD = 128
"""Both sides of a quantised matrix are multiples of this: the rotations work on blocks of 128 channels."""

_WORDS_INTEGER = tuple(16 * k for k in range(1, 9))
_WORDS_HALF = tuple(16 * k + 8 for k in range(1, 4))


class CodebookName(enum.Enum):
    """How a 16-bit state becomes a weight (EXL3 format)."""

    DEFAULT = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A linear in EXL3 form, y = x W + bias, views into the mapped files where possible.

    trellis: int16 (in/16, out/16, 16 bits). suh: float16 (in,). svh: float16 (out,). bias: float16 (out,).
    """

    key: str
    trellis: NDArray[np.int16]
    suh: NDArray[np.float16]
    svh: NDArray[np.float16]
    codebook: CodebookName
    bias: NDArray[np.float16] | None = None

    @property
    def in_features(self) -> int:
        """Width of x."""
        return int(self.trellis.shape[0]) * TILE

    @property
    def out_features(self) -> int:
        """Width of y."""
        return int(self.trellis.shape[1]) * TILE


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A linear stored as numbers, y = x weight^T. weight: float32 or float16 (out, in)."""

    key: str
    weight: NDArray[Any]

    @property
    def in_features(self) -> int:
        """Width of x."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """Width of y."""
        return int(self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class TensorNeed:
    """A tensor the model reads, of this shape and one of these dtypes."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True, slots=True)
class LinearNeed:
    """A linear the model reads: quantised (key.trellis ...) or plain (key.weight) as the file has it.

    must_be_quantized: a plain one is refused.
    """

    key: str
    in_features: int
    out_features: int
    must_be_quantized: bool = False


class Checkpoint:
    """All tensors of a model directory, mapped. Immutable after construction; usable from any thread.

    Raises CheckpointError, one line naming file and tensor, for whatever is missing or malformed.
    """

    def __init__(self, model_dir: Path) -> None:
        if not model_dir.is_dir():
            raise CheckpointError(f"{model_dir}: no such directory; name the folder that holds the model")
        paths = sorted(model_dir.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{model_dir}: holds no .safetensors file; name the folder of the weights")
        self.model_dir = model_dir
        self._files: dict[str, SafetensorsFile] = {}
        for path in paths:
            file = SafetensorsFile(path)
            for name in file.tensors:
                if name in self._files:
                    raise CheckpointError(
                        f"{path}: {name}: is also in {self._files[name].path.name}; remove one of the files"
                    )
                self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> tuple[str, ...]:
        """Give the names of all tensors, file by file."""
        return tuple(self._files)

    def info(self, name: str) -> TensorInfo:
        """Give dtype, shape and place of a tensor."""
        return self._file(name).tensors[name]

    def path(self, name: str) -> Path:
        """Give the file that holds a tensor."""
        return self._file(name).path

    def raw(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> NDArray[Any]:
        """Give a read-only view of a tensor of exactly this shape and one of these dtypes."""
        self._check(TensorNeed(name, shape, tuple(dtypes)))
        return self._file(name).view(self.info(name))

    def float32(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Give a tensor as float32; a float32 tensor is a view, others are converted copies."""
        array = self.raw(name, shape, FLOATS)
        if self.info(name).dtype == "BF16":
            return bfloat16_to_float32(array)
        # A file may place float32 data at any byte; the kernels want whole words.
        return np.require(array, np.float32, ["C_CONTIGUOUS", "ALIGNED"])

    def plain(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Give a weight as float32 or float16, as it is stored; bfloat16 becomes float32. Aligned."""
        if self.info(name).dtype == "F16":
            return np.require(self.raw(name, shape, ("F16",)), requirements=["ALIGNED"])
        return self.float32(name, shape)

    def linear(self, need: LinearNeed) -> QuantizedLinear | PlainLinear:
        """Give a linear in the form in which it is stored. Plain weights: bfloat16 becomes float32."""
        if f"{need.key}.trellis" in self or need.must_be_quantized:
            return self.quantized(need)
        name, shape = f"{need.key}.weight", (need.out_features, need.in_features)
        if name not in self:
            raise CheckpointError(f"{self.model_dir}: {need.key}: has neither .trellis nor .weight")
        return PlainLinear(need.key, self.plain(name, shape))

    def quantized(self, need: LinearNeed) -> QuantizedLinear:
        """Give a linear that must be stored in EXL3 form."""
        key, rows, columns = need.key, need.in_features, need.out_features
        self._check_trellis(need)
        info = self.info(f"{key}.trellis")
        bias_name = f"{key}.bias"
        return QuantizedLinear(
            key=key,
            trellis=self.raw(info.name, info.shape, ("I16", "U16")).view(np.int16),
            suh=self._signs(key, "suh", "su", rows),
            svh=self._signs(key, "svh", "sv", columns),
            codebook=self._codebook(key),
            bias=self.raw(bias_name, (columns,), ("F16",)) if bias_name in self else None,
        )

    def check(self, needs: Iterable[TensorNeed | LinearNeed]) -> None:
        """Look every need up without reading data. Raises CheckpointError naming the first and the count."""
        missing: list[str] = []
        for need in needs:
            tensors = [need] if isinstance(need, TensorNeed) else self._tensors_of(need)
            absent = [tensor.name for tensor in tensors if tensor.name not in self]
            missing += absent
            if not absent:
                for tensor in tensors:
                    self._check(tensor)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"{self.model_dir}: tensors are missing: {', '.join(missing[:3])}{more}; fetch them"
            )

    def needed_bytes(self, needs: Iterable[TensorNeed | LinearNeed]) -> int:
        """Give the size of the tensors behind `needs`, which must have passed check()."""
        total = 0
        for need in needs:
            if isinstance(need, TensorNeed):
                total += self.info(need.name).num_bytes
            else:
                parts = ("trellis", "suh", "svh", "su", "sv", "bias", "weight")
                names = (f"{need.key}.{part}" for part in parts)
                total += sum(self.info(name).num_bytes for name in names if name in self)
        return total

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.model_dir}: {name}: is in none of the .safetensors files")
        return file

    def _check(self, need: TensorNeed) -> None:
        info = self.info(need.name)
        where = f"{self._file(need.name).path}: {need.name}"
        if info.dtype not in need.dtypes:
            raise CheckpointError(f"{where}: has dtype {info.dtype}, expected {' or '.join(need.dtypes)}")
        if info.shape != need.shape:
            raise CheckpointError(
                f"{where}: has shape {list(info.shape)}, config.json asks for {list(need.shape)}"
            )

    def _check_trellis(self, need: LinearNeed) -> None:
        name = f"{need.key}.trellis"
        info = self.info(name)
        where = f"{self._file(name).path}: {name}"
        if need.in_features % HADAMARD or need.out_features % HADAMARD:
            raise CheckpointError(
                f"{where}: {need.in_features} x {need.out_features} is not in multiples of {HADAMARD}"
            )
        if len(info.shape) != 3 or info.shape[:2] != (need.in_features // TILE, need.out_features // TILE):
            tiles = f"[{need.in_features // TILE}, {need.out_features // TILE}, 16 K]"
            raise CheckpointError(f"{where}: has shape {list(info.shape)}, config.json asks for {tiles}")
        words = info.shape[2]
        codebook = self._codebook(need.key)
        allowed = _WORDS_INTEGER + (_WORDS_HALF if codebook is CodebookName.MUL1 else ())
        if words not in allowed:
            raise CheckpointError(
                f"{where}: K = {words / 16:g} bits is not supported with codebook {codebook.value}"
            )

    def _tensors_of(self, need: LinearNeed) -> list[TensorNeed]:
        """List the tensors of a linear in the form in which it is stored."""
        key, rows, columns = need.key, need.in_features, need.out_features
        trellis = f"{key}.trellis"
        if trellis not in self:
            if need.must_be_quantized or f"{key}.weight" not in self:
                return [TensorNeed(trellis, ())]
            return [TensorNeed(f"{key}.weight", (columns, rows))]
        self._check_trellis(need)
        tensors = [TensorNeed(trellis, self.info(trellis).shape, ("I16", "U16"))]
        for new, old, features in (("suh", "su", rows), ("svh", "sv", columns)):
            if f"{key}.{old}" in self and f"{key}.{new}" not in self:
                tensors.append(TensorNeed(f"{key}.{old}", (features // 16,), ("I16", "U16")))
            else:
                tensors.append(TensorNeed(f"{key}.{new}", (features,), ("F16",)))
        if f"{key}.bias" in self:
            tensors.append(TensorNeed(f"{key}.bias", (columns,), ("F16",)))
        return tensors

    def _codebook(self, key: str) -> CodebookName:
        """Tell the codebook by the scalar that is there; its value must be the one the kernels know."""
        found = []
        for name, multiplier in ((CodebookName.MCG, MCG_MULTIPLIER), (CodebookName.MUL1, MUL1_MULTIPLIER)):
            tensor = f"{key}.{name.value}"
            if tensor not in self:
                continue
            value = int(self._file(tensor).view(self.info(tensor)).reshape(-1)[0]) & 0xFFFFFFFF
            if value != multiplier:
                raise CheckpointError(
                    f"{self._file(tensor).path}: {tensor}: unknown codebook multiplier 0x{value:08x}"
                )
            found.append(name)
        if len(found) > 1:
            raise CheckpointError(f"{self.model_dir}: {key}: names two codebooks, mcg and mul1")
        return found[0] if found else CodebookName.DEFAULT

    def _signs(self, key: str, new: str, old: str, features: int) -> NDArray[np.float16]:
        """Give the scales of one side; old files hold only signs, as bits, lowest first, 1 for -1."""
        if f"{key}.{new}" in self or f"{key}.{old}" not in self:
            return self.raw(f"{key}.{new}", (features,), ("F16",))
        words = self.raw(f"{key}.{old}", (features // 16,), ("I16", "U16")).view(np.uint16)
        bits = (words[:, None] >> np.arange(16, dtype=np.uint16)) & 1
        return (1 - 2 * bits.reshape(-1).astype(np.int8)).astype(np.float16)


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bfloat16 bits of any shape; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
