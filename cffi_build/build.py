"""Compile the kernels: pure functions of paths and a compiler command; nothing here reads the environment.

API mode gives `_kernels.<suffix>.so`, a Python extension module that cffi generates from the header; it needs
Python.h. ABI mode gives `_kernels_abi.so`, a plain shared library that cffi opens with the same declarations,
which `_kernels_build.json` carries beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cffi

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra")
"""-ffp-contract=off: a fused multiply-add appears where a kernel says so, never where the compiler likes one,
so that a row's bits do not depend on how a loop was unrolled."""

MODULE = "glm53srv._kernels"
STAMP = "_kernels_build.json"
BEGIN, END = "/* CDEF BEGIN */", "/* CDEF END */"


class BuildError(Exception):
    """The kernels could not be built; the text carries the compiler's own output."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The native tree of one checkout."""

    root: Path

    @property
    def include(self) -> Path:
        return self.root / "native" / "include"

    @property
    def header(self) -> Path:
        return self.include / "glm53_kernels.h"

    def c_files(self) -> list[Path]:
        return sorted((self.root / "native" / "src").glob("*.c"))

    def all_files(self) -> list[Path]:
        headers = (self.root / "native" / "src").glob("*.h")
        return [self.header, *self.c_files(), *sorted(headers), *sorted(Path(__file__).parent.glob("*.py"))]

    def cdef(self) -> str:
        """Give the declarations between the header's two markers. Raises BuildError if they are missing."""
        text = self.header.read_text()
        if BEGIN not in text or END not in text:
            raise BuildError(f"{self.header} has no {BEGIN} ... {END} section")
        return text.split(BEGIN, 1)[1].split(END, 1)[0]


def build(
    root: Path,
    out: Path,
    *,
    compiler: str = "cc",
    mode: str = "auto",
    include: Path | None = None,
    force: bool = False,
) -> str:
    """Build into the package directory `out` and return one line that says what was done.

    compiler: a command, perhaps with arguments. mode: "api", "abi", or "auto" (api if there is a Python.h).
    include: where Python.h is looked for, by default where this Python says. Raises BuildError, with the
    compiler's output.
    """
    sources = Sources(root)
    include = include or Path(sysconfig.get_path("include"))
    has_header = (include / "Python.h").is_file()
    chosen = mode if mode != "auto" else ("api" if has_header else "abi")
    target = out / target_name(chosen)
    fingerprint = _fingerprint(sources, compiler, chosen)
    if not force and target.is_file() and _read_fingerprint(out / STAMP) == fingerprint:
        return f"native kernels: {target.name} is up to date"
    _compile(sources, target, shlex.split(compiler), include if chosen == "api" else None)
    for stale in (out / target_name("api"), out / target_name("abi")):
        if stale != target:
            stale.unlink(missing_ok=True)
    stamp = {"fingerprint": fingerprint, "mode": chosen, "library": target.name, "cdef": sources.cdef()}
    (out / STAMP).write_text(json.dumps(stamp))
    note = "" if has_header or mode != "auto" else " (no Python.h: plain library through cffi ABI mode)"
    return f"native kernels: built {target.name} with {compiler}{note}"


def target_name(mode: str) -> str:
    """Give the file name of the library that `mode` builds for this Python."""
    return "_kernels_abi.so" if mode == "abi" else f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"


def _compile(sources: Sources, target: Path, compiler: Sequence[str], python_include: Path | None) -> None:
    work = sources.root / "build" / "native"
    work.mkdir(parents=True, exist_ok=True)
    files = sources.c_files()
    flags = [*FLAGS, f"-I{sources.include}"]
    if python_include is not None:
        ffi = cffi.FFI()
        ffi.cdef(sources.cdef())
        ffi.set_source(MODULE, '#include "glm53_kernels.h"')
        wrapper = work / "_kernels.c"
        with contextlib.redirect_stdout(io.StringIO()):
            ffi.emit_c_code(str(wrapper))
        files = [*files, wrapper]
        # Python's own headers and cffi's generated code are not ours to hold to -Wextra.
        flags += [f"-isystem{python_include}", "-Wno-unused-parameter"]
    # Written aside and renamed, so that a running process keeps the file that it has mapped.
    partial = target.with_name(target.name + ".part")
    command = [*compiler, *flags, "-shared", "-o", str(partial), *map(str, files), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"cannot run the C compiler {compiler[0]!r} ({error}); install gcc, or set CC"
        ) from error
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}native kernels: the build failed")
    partial.replace(target)


def _fingerprint(sources: Sources, compiler: str, mode: str) -> str:
    digest = hashlib.sha256(repr((FLAGS, compiler, mode, sys.version, cffi.__version__)).encode())
    for path in sources.all_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _read_fingerprint(stamp: Path) -> str | None:
    try:
        return str(json.loads(stamp.read_text())["fingerprint"])
    except (OSError, ValueError, KeyError):
        return None
