"""Every client command runs as a file, with the standard library alone, and explains itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.facts import REPOSITORY

FILES = [path for path in sorted(REPOSITORY.glob("bench/*.py")) if "sys.path" in path.read_text("utf-8")]
CLIENTS = ("score_ref_panel", "sweep", "needle", "compare", "mixed_load")


@pytest.mark.parametrize("tool", CLIENTS)
def test_a_client_command_needs_the_standard_library_alone(tool: str) -> None:
    # -I -S: no site-packages, no variables, no working directory on the path
    command = [sys.executable, "-I", "-S", str(REPOSITORY / "bench" / f"{tool}.py"), "--help"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert f"bench.{tool}" in done.stdout
    assert "Exit code" in done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_run_as_a_file_a_benchmark_leaves_pythons_own_modules_in_sight(path: Path) -> None:
    code = (
        "import runpy, sys; sys.path[0] = 'bench'; runpy.run_path(sys.argv[1]); "
        "import cProfile; cProfile.run"  # imports profile, as torch does
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=REPOSITORY, check=True)
