"""Every client command runs as a file, with the standard library alone, and explains itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.facts import REPOSITORY

CLIENTS = ("score_ref_panel", "sweep", "needle", "compare", "mixed_load")


@pytest.mark.parametrize("tool", CLIENTS)
def test_a_client_command_needs_the_standard_library_alone(tool: str) -> None:
    # -I -S: no site-packages, no variables, no working directory on the path
    command = [sys.executable, "-I", "-S", str(REPOSITORY / "bench" / f"{tool}.py"), "--help"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert f"bench.{tool}" in done.stdout
    assert "Exit code" in done.stdout
