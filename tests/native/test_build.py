"""Building the kernels: both forms open, nothing is built twice, and a failure shows the compiler's words.

Each build goes into a folder of its own, so that the library under test elsewhere stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from cffi_build.build import BuildError, Sources, build, target_name
from glm53srv.errors import MachineError
from glm53srv.kernels import Isa, KernelPool
from glm53srv.native_library import NativeLibrary, open_library
from reference import exl3
from tests.native.builders import as_matrix

ROOT = Path(__file__).resolve().parents[2]

PORTABLE = "cc -DGLM53_PORTABLE"
"""Compiles the scalar kernels only: a quarter of the time, for tests of the build itself."""

needs_header = pytest.mark.skipif(
    not (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    reason="Python.h is not installed (apt-get install python3-dev)",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the native tree, so that a test may change it."""
    shutil.copytree(ROOT / "native", tmp_path / "native")
    (tmp_path / "package").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def portable_library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    package = tmp_path_factory.mktemp("portable")
    build(ROOT, package, compiler=PORTABLE, mode="abi")
    return open_library(package)


def _status_text(library: NativeLibrary, status: int) -> str:
    return str(library.ffi.string(library.lib.glm53_status_text(status)).decode())


@pytest.mark.parametrize("mode", [pytest.param("api", marks=needs_header), "abi"])
def test_each_mode_builds_a_library_that_opens(checkout: Path, mode: str) -> None:
    message = build(checkout, checkout / "package", mode=mode)
    library = open_library(checkout / "package")
    assert "built" in message
    assert target_name(mode) in message
    assert library.mode == mode
    assert _status_text(library, library.lib.GLM53_BUSY) == "the pool is running another job"
    assert library.features().isas == open_library().features().isas
    matrix = as_matrix(exl3.random_tensors(np.random.default_rng(1), 256, 128, 3, "mul1", bias=True))
    x = np.random.default_rng(2).normal(size=(3, 256)).astype(np.float32)
    with KernelPool(2) as expected, KernelPool(2, library=library) as actual:
        np.testing.assert_array_equal(actual.linear(x, matrix), expected.linear(x, matrix))


def test_second_build_does_nothing_until_a_source_changes(checkout: Path) -> None:
    package = checkout / "package"
    build(checkout, package, compiler=PORTABLE, mode="abi")
    assert "up to date" in build(checkout, package, compiler=PORTABLE, mode="abi")
    source = checkout / "native" / "src" / "dispatch.c"
    source.write_text(source.read_text() + "\n/* changed */\n")
    assert "built" in build(checkout, package, compiler=PORTABLE, mode="abi")


@needs_header
def test_changing_the_mode_removes_the_other_form(checkout: Path) -> None:
    package = checkout / "package"
    build(checkout, package, compiler=PORTABLE, mode="api")
    build(checkout, package, compiler=PORTABLE, mode="abi")
    assert sorted(path.name for path in package.iterdir()) == ["_kernels_abi.so", "_kernels_build.json"]
    assert json.loads((package / "_kernels_build.json").read_text())["mode"] == "abi"


def test_failed_build_shows_the_compilers_words(checkout: Path) -> None:
    (checkout / "native" / "src" / "broken.c").write_text("int broken(void) { return missing; }\n")
    with pytest.raises(BuildError, match=r"missing.* undeclared|undeclared identifier.*missing"):
        build(checkout, checkout / "package", compiler=PORTABLE, mode="abi")
    assert not list((checkout / "package").iterdir())


def test_missing_compiler_says_what_to_install(checkout: Path) -> None:
    with pytest.raises(BuildError, match="cannot run the C compiler 'no-such-compiler'"):
        build(checkout, checkout / "package", compiler="no-such-compiler", mode="abi")


def test_missing_python_header_falls_back_and_says_so(checkout: Path) -> None:
    message = build(checkout, checkout / "package", compiler=PORTABLE, mode="auto", include=checkout)
    assert "_kernels_abi.so" in message
    assert "no Python.h" in message


def test_command_prints_one_line(checkout: Path) -> None:
    command = [sys.executable, "-m", "cffi_build", "--mode", "abi", "--out", str(checkout / "package")]
    environment = {**os.environ, "CC": PORTABLE}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "_kernels_abi.so" in done.stdout


@pytest.mark.parametrize("isa", [Isa.AVX2, Isa.AVX512, Isa.AMX], ids=lambda isa: isa.name)
def test_portable_build_offers_the_scalar_kernels_alone(portable_library: NativeLibrary, isa: Isa) -> None:
    assert portable_library.features().isas == (Isa.SCALAR,)
    refusal = f"{isa.name} is not there: this CPU and build offer SCALAR$"
    with pytest.raises(MachineError, match=refusal):
        KernelPool(1, isa, library=portable_library)


def test_declarations_come_from_the_header() -> None:
    cdef = Sources(ROOT).cdef()
    assert "glm53_experts" in cdef
    assert "#" not in cdef
