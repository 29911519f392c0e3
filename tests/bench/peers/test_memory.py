"""Memory of a process and of all below it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.facts import process_memory
from bench.peers.memory import peak_ram_gib
from glm53srv.machine import GIB


def lay_out(proc: Path, parents: dict[int, int]) -> None:
    for number, parent in parents.items():
        (proc / str(number)).mkdir()
        (proc / str(number) / "stat").write_text(f"{number} (a) name) S {parent} 1 1")
    (proc / "meminfo").write_text("")


def test_a_childs_memory_is_counted(tmp_path: Path) -> None:
    code = "import sys; held = bytearray(40 << 20); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        # Its parent may have been faster than its last few pages: the peak can still grow by them.
        own = pytest.approx(process_memory(child.pid)["peak_bytes"] / GIB, abs=1 / 1024)
        assert peak_ram_gib(child.pid) == own
        assert peak_ram_gib(child.pid) > 40 / 1024
        assert peak_ram_gib() > 40 / 1024
        # A family that is made up around the child: only its own processes count, at any depth.
        lay_out(tmp_path, {10: 1, 11: 10, child.pid: 11, 12: 1})
        assert peak_ram_gib(10, tmp_path) == own
        assert peak_ram_gib(12, tmp_path) == 0
        child.communicate()
