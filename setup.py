"""Builds the native kernels with the package and puts the demo model into it; everything else stands in
pyproject.toml.

cffi's own setuptools hook needs Python.h. This one goes through cffi_build, which can do without it.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

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


class CopyDemoModel(build_py):
    """Puts reference/demo/checkpoint into the package, where glm53srv/demo_model.py looks for it.

    A copy at build time and not a folder of the package: training writes there, and git keeps it once.
    """

    def run(self) -> None:
        super().run()
        for source, target in self._demo_files():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._demo_files())]

    def _demo_files(self) -> list[tuple[Path, Path]]:
        """Give (file, its place in the package); none while the weights are missing, or in an editable
        install, which has the checkout."""
        folder = ROOT / "reference" / "demo" / "checkpoint"
        if self.editable_mode or not (folder / "model.safetensors").is_file():
            return []
        out = Path(self.build_lib) / "glm53srv" / "demo_checkpoint"
        return [(path, out / path.name) for path in sorted(folder.iterdir())]


COMMANDS = {"build_ext": BuildKernels, "build_py": CopyDemoModel}
# The extension has no sources of its own: it marks the wheel as one for this platform.
setup(ext_modules=[Extension("glm53srv._kernels", sources=[])], cmdclass=COMMANDS)
