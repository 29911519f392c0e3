"""Builds the native kernels with the package; everything else stands in pyproject.toml.

cffi's own setuptools hook needs Python.h. This one goes through cffi_build, which can do without it.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build back end does not put the project's folder on the path

from cffi_build.build import STAMP, build, target_name  # noqa: E402


class BuildKernels(build_ext):
    """Puts the library and its stamp where setuptools expects an extension of the package."""

    def run(self) -> None:
        out = ROOT / "glm53srv" if self.inplace else Path(self.build_lib) / "glm53srv"
        out.mkdir(parents=True, exist_ok=True)
        self.announce(build(ROOT, out, compiler=os.environ.get("CC") or "cc"), level=2)

    def get_outputs(self) -> list[str]:
        out = Path(self.build_lib) / "glm53srv"
        names = [target_name("api"), target_name("abi"), STAMP]
        return [str(out / name) for name in names if (out / name).exists()]


# The extension has no sources of its own: it marks the wheel as one for this platform.
setup(ext_modules=[Extension("glm53srv._kernels", sources=[])], cmdclass={"build_ext": BuildKernels})
