"""What the control groups (versions 1 and 2) leave this process of memory and processor time.

A process sees the files of its group below the mount (on the host) or at the mount's top (inside a container,
which has its own view). Both places and all parents are read; the least counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 2**62
"""Sizes at or above this stand for "no limit" (version 1 writes a number near 2**63)."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """Give the memory limit in bytes, None without one."""
    limits = [
        *(_size(folder / "memory.max") for folder in _folders(root, "")),
        *(_size(folder / "memory.limit_in_bytes") for folder in _folders(root, "memory")),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Give the processor time per time, in cores, None without a limit."""
    quotas = []
    for folder in _folders(root, ""):
        words = _read(folder / "cpu.max").split()  # "max 100000" or "200000 100000"
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _folders(root, "cpu"):
        quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # version 1 writes -1 for none
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Give the folders of this process's group and its parents; controller "": version 2."""
    mount = root / "sys/fs/cgroup" / controller
    yield mount
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (controller and controller in names.split(",")) or (
            not controller and (number, names) == ("0", "")
        ):
            group = mount / path.strip().lstrip("/")
            yield from (folder for folder in (group, *group.parents) if mount in folder.parents)


def _size(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
