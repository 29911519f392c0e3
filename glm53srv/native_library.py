"""Finds and opens the compiled kernels, which come in one of two forms, both built by `python -m cffi_build`:
an extension module (cffi API mode) or, where Python.h is missing, a plain shared library (ABI mode).

Importing this module opens neither.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from glm53srv.errors import MachineError

_BUILD_HINT = "build them with: python -m cffi_build"


class Isa(enum.IntEnum):
    """Instruction sets, worst first; AUTO takes the best that CPU and build have."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    AMX = 4


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What this CPU and this build offer. mode: "api" or "abi"; library: the file that was opened."""

    isas: tuple[Isa, ...]
    mode: str
    library: str


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The opened kernels: ffi makes C values, lib holds the functions of native/include/glm53_kernels.h."""

    ffi: Any
    lib: Any
    mode: str
    path: str

    def features(self) -> CpuFeatures:
        mask = self.lib.glm53_isa_mask()
        isas = tuple(isa for isa in Isa if mask >> isa & 1)
        return CpuFeatures(isas=isas, mode=self.mode, library=self.path)


@functools.cache
def open_library(directory: Path | None = None) -> NativeLibrary:
    """Open the newest library in the package directory (or another one), once per process.

    Raises MachineError, naming the command to run, if there is none that this Python can open.
    """
    folder = directory or Path(__file__).resolve().parent
    found = sorted(folder.glob("_kernels*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    reasons = []
    for path in found:
        try:
            return _open_abi(path) if path.name == "_kernels_abi.so" else _open_api(path)
        except (ImportError, OSError, KeyError, ValueError) as error:
            reasons.append(f"{path.name}: {error}")
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    raise MachineError(f"the native kernels are not built{detail}; {_BUILD_HINT}")


def _open_api(path: Path) -> NativeLibrary:
    spec = importlib.util.spec_from_file_location("glm53srv._kernels", path)
    if spec is None or spec.loader is None:
        raise ImportError("made for another Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return NativeLibrary(module.ffi, module.lib, "api", str(path))


def _open_abi(path: Path) -> NativeLibrary:
    ffi = cffi.FFI()
    ffi.cdef(json.loads((path.parent / "_kernels_build.json").read_text())["cdef"])
    return NativeLibrary(ffi, ffi.dlopen(str(path)), "abi", str(path))
