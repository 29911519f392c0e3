"""The most memory that this process and its children have held."""

from __future__ import annotations

import os
from pathlib import Path

from bench.facts import process_memory
from glm53srv.machine import GIB


def peak_ram_gib(process_id: int | None = None, proc: Path = Path("/proc")) -> float:
    """Add up the peaks of a process, by default this one, and of all below it that still run, in GiB.

    Peaks of different moments count as one; memory that two share counts twice. Both are small here: the
    children of stock's process hold the CPU's experts from the load on.
    """
    first = os.getpid() if process_id is None else process_id
    return sum(process_memory(each).get("peak_bytes", 0) for each in (first, *_below(first, proc))) / GIB


def _below(first: int, proc: Path) -> list[int]:
    """List the processes below one."""
    parents = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            try:
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended
            # pid (name) state parent ...; a name may hold blanks and brackets
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found: list[int] = []
    level = [first]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found
