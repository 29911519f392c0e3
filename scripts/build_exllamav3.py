#!/usr/bin/env python3
"""Compile the extension of exllamav3 into the environment whose Python runs this.

    TORCH_CUDA_ARCH_LIST=8.6 .venv/bin/python scripts/build_exllamav3.py

The wheel on PyPI holds sources, which the package would compile at its first import: many minutes in which a
server does not answer, a compiler and the CUDA toolkit in the final image, and a result in somebody's home.
Here the same sources are compiled once, with the flags of the package's ext.py (1.5.1) less the line numbers,
and laid beside the package, where it looks first. Needs nvcc, g++ and Python.h, no GPU.

TORCH_CUDA_ARCH_LIST: compute capabilities, such as "8.6" or "8.6;8.9"; those of the GPUs here by default.
MAX_JOBS: compilers at a time; by default what the cores and 2 GiB of memory for each allow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

NAME = "exllamav3_ext"
STAMP = "exllamav3_ext_build.json"
SOURCE_SUFFIXES = (".c", ".cpp", ".cu")
CXX_FLAGS = ["-Ofast"]
NVCC_FLAGS = [
    "-O3",
    "--use_fast_math",
    *("-Xcudafe", "--diag_suppress=177"),
    *("-Xcudafe", "--diag_suppress=20012"),
]
JOB_BYTES = 2 * 2**30
"""Memory that one nvcc may take on these sources."""


class BuildError(Exception):
    """Something is missing; the text says what to do."""


def main(environ: Mapping[str, str] = os.environ) -> int:
    site = Path(sysconfig.get_path("platlib"))
    try:
        arches = environ.get("TORCH_CUDA_ARCH_LIST") or local_arches()
        wanted = stamp_of(arches)
        target = site / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if target.exists() and read_stamp(site) == wanted:
            print(f"{target.name}: built already, for {arches}")
            return 0
        spec = find_spec("exllamav3")  # does not import it: importing is what would compile
        if spec is None or spec.origin is None:
            raise BuildError("exllamav3 is not installed here: run scripts/bootstrap.py --cuda first")
        jobs = environ.get("MAX_JOBS") or str(num_jobs(os.cpu_count() or 1, available_bytes()))
        compile_extension(
            Path(spec.origin).parent / NAME, site, {"TORCH_CUDA_ARCH_LIST": arches, "MAX_JOBS": jobs}
        )
    except BuildError as error:
        print(f"build_exllamav3: {error}", file=sys.stderr)
        return 1
    (site / STAMP).write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size / 1e6:.0f} MB, for {arches}")
    return 0


def sources_in(folder: Path) -> list[str]:
    """Give the sources, sorted, so that the same tree links in the same order. Raises BuildError for none."""
    found = sorted(str(path) for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES)
    if not found:
        raise BuildError(f"no sources below {folder}: this exllamav3 is not the 1.5.1 of PyPI")
    return found


def compile_extension(folder: Path, site: Path, settings: Mapping[str, str]) -> None:
    """Compile and put the library into `site`. settings: variables that torch's build reads."""
    sources = sources_in(folder)
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        raise BuildError("no nvcc: install the CUDA 13 toolkit, and put its bin on PATH or set CUDA_HOME")
    os.environ.update(settings)
    from setuptools import setup
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    extension = CUDAExtension(
        NAME,
        sources,
        include_dirs=[str(folder)],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    )
    with tempfile.TemporaryDirectory() as work:
        setup(
            name=NAME,
            ext_modules=[extension],
            cmdclass={"build_ext": BuildExtension},
            script_args=["--quiet", "build_ext", "--build-lib", str(site), "--build-temp", work],
        )


def stamp_of(arches: str) -> dict[str, str]:
    """Name what the library depends on: its ABI is that of one torch and one Python."""
    return {
        "exllamav3": metadata.version("exllamav3"),
        "torch": metadata.version("torch"),
        "python": sysconfig.get_python_version(),
        "arches": arches,
    }


def read_stamp(site: Path) -> object:
    """Give what the library in `site` was built for, None if that is not known."""
    try:
        return json.loads((site / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def local_arches() -> str:
    """Give the compute capabilities of the GPUs of this machine, as torch takes them: "8.6;8.9"."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            "no GPU answers here: say for which to build, as TORCH_CUDA_ARCH_LIST=8.6"
        ) from error
    return ";".join(sorted(set(text.split())))


def num_jobs(num_cores: int, memory_bytes: int) -> int:
    """Give how many compilers may run: one per core while each has its memory."""
    return max(1, min(num_cores, memory_bytes // JOB_BYTES))


def available_bytes() -> int:
    """Give the memory that can be used now."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return JOB_BYTES


if __name__ == "__main__":
    raise SystemExit(main())
