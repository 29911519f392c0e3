#!/usr/bin/env python3
"""Make .venv beside this repository, with pinned packages and the native kernels. Standard library only.

    python3 scripts/bootstrap.py          what serving needs
    python3 scripts/bootstrap.py --dev    also what `make test` needs
    python3 scripts/bootstrap.py --cuda   what serving on a GPU needs: torch, triton, exllamav3 (several GB)
    python3 scripts/bootstrap.py --triton .venv-triton, with what `make test-triton` needs (torch among it)

--packages-only stops before the native kernels, for an image whose packages are a layer of their own.

Debian and Ubuntu ship Python without ensurepip. Then the environment is made by the first of: a system pip
that can install into another environment, uv, or (as root, with apt-get) the package python3-venv; else one
line says what to install.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
NEWEST = (3, 13)


@dataclass(frozen=True)
class Environment:
    """One virtual environment. is_hashed: every file of its requirements is named by its hash."""

    folder: Path
    requirements: str
    is_hashed: bool = True

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


SERVING = Environment(ROOT / ".venv", "requirements/base.txt")
TESTING = Environment(ROOT / ".venv", "requirements/dev.txt")
CUDA = Environment(ROOT / ".venv", "requirements/cuda.txt")
TRITON = Environment(ROOT / ".venv-triton", "requirements/triton.txt", is_hashed=False)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make .venv for glm53srv.")
    kinds = parser.add_mutually_exclusive_group()
    for flag, environment, text in (
        ("--dev", TESTING, "also install what `make test` needs"),
        ("--cuda", CUDA, "install what serving on a GPU needs"),
        ("--triton", TRITON, "make .venv-triton for `make test-triton`"),
    ):
        kinds.add_argument(flag, dest="environment", action="store_const", const=environment, help=text)
    parser.add_argument("--packages-only", action="store_true", help="stop before the native kernels")
    parser.set_defaults(environment=SERVING)
    arguments = parser.parse_args(argv)
    environment = arguments.environment
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return _fail(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} is not supported, glm53srv needs 3.11 to "
            "3.13: name another one, as in `make serve PYTHON=python3.12`"
        )
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        return _fail("no C compiler: install gcc (Debian, Ubuntu: apt-get install gcc), or name one with CC=")
    try:
        if not environment.python.exists():
            _create(environment.folder)
        _install(environment)
        if arguments.packages_only:
            return 0
        _run([str(environment.python), "-m", "cffi_build"])
        _link_package(environment)
    except subprocess.CalledProcessError as error:
        return _fail(f"`{' '.join(map(str, error.cmd))}` ended with exit code {error.returncode}")
    except FileNotFoundError as error:
        return _fail(str(error))
    return 0


def _create(folder: Path) -> None:
    """Create the environment with pip in it. Raises FileNotFoundError with the remedy when nothing can."""
    if importlib.util.find_spec("ensurepip") is not None:
        _run([sys.executable, "-m", "venv", str(folder)])
    elif importlib.util.find_spec("pip") is not None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    elif uv := shutil.which("uv"):
        _run([uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)])
    elif os.geteuid() == 0 and (apt := shutil.which("apt-get")):
        print("Python has no venv module here: installing python3-venv with apt-get", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run([apt, "update", "-qq"], environment)
        _run([apt, "install", "-y", "-qq", "--no-install-recommends", "python3-venv"], environment)
        _run([sys.executable, "-m", "venv", str(folder)])
    else:
        raise FileNotFoundError(
            "Python has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"
        )


def _install(environment: Environment) -> None:
    """Install pinned packages into the environment, by its own pip or the system's."""
    own_pip = any((environment.folder / "lib").glob("python*/site-packages/pip"))
    pip = [str(environment.python), "-m", "pip"]
    if not own_pip:
        pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    if environment.is_hashed:
        options.append("--require-hashes")
    _run([*pip, "install", *options, "-r", str(ROOT / environment.requirements)])


def _link_package(environment: Environment) -> None:
    """Put the repository on the environment's path and the `glm53srv` command into its bin.

    The same effect as an editable install, without downloading a build backend.
    """
    for folder in (environment.folder / "lib").glob("python*/site-packages"):
        (folder / "glm53srv.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    command = environment.folder / "bin" / "glm53srv"
    command.write_text(
        f"#!{environment.python}\nfrom glm53srv.__main__ import run\n\nrun()\n", encoding="utf-8"
    )
    command.chmod(0o755)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def _fail(text: str) -> int:
    print(f"bootstrap: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
