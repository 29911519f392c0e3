"""What this machine has, read from files under a given root, so that tests can lay out another machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from glm53srv.cgroup import cpu_quota, memory_limit

GIB = 2**30


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine. Sizes in bytes.

    available_bytes: what the kernel thinks can be used without swapping (MemAvailable). limit_bytes: the
    control group's memory limit, None without one. num_cores: cores this process may run on.
    num_physical_cores: distinct (package, core) pairs among them. cpu_flags: the kernel's names, such as
    avx2, fma, f16c. cpus: logical CPUs this process may run on, ascending; core_cpus: the first of each
    physical core. cpu_quota: processor time that the control groups grant, in cores, None without a limit.
    memlock_bytes: memory this process may lock, None without a limit. transparent_huge_pages: always, madvise
    or never, "" where the kernel has none. free_huge_bytes: free pages of the hugetlb pool. kernel: its
    release.
    """

    architecture: str
    cpu_model: str
    cpu_flags: frozenset[str]
    num_cores: int
    num_physical_cores: int
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    nvidia_devices: tuple[str, ...]
    cpus: tuple[int, ...] = ()
    core_cpus: tuple[int, ...] = ()
    cpu_quota: float | None = None
    memlock_bytes: int | None = None
    transparent_huge_pages: str = ""
    free_huge_bytes: int = 0
    kernel: str = ""

    @property
    def is_wsl(self) -> bool:
        """Whether this is Linux under Windows, which caps pinned memory."""
        return "microsoft" in self.kernel.lower()

    @property
    def usable_bytes(self) -> int:
        """Memory this process can count on: what is available, capped by the control group."""
        return (
            self.available_bytes if self.limit_bytes is None else min(self.available_bytes, self.limit_bytes)
        )


def read_machine(root: Path = Path("/"), cores: frozenset[int] | None = None) -> MachineFacts:
    """Read /proc and /sys under `root`. cores: the ids this process may run on, None asks the scheduler.

    A file that is missing leaves its fact empty or zero; nothing is raised.
    """
    cpus = _parse_cpuinfo(_read(root / "proc/cpuinfo"))
    allowed = cores if cores is not None else _allowed_cores()
    mine = [cpu for cpu in cpus if int(cpu["processor"]) in allowed] or cpus
    first = mine[0] if mine else {}
    first_cpus: dict[tuple[str, str], int] = {}
    for cpu in sorted(mine, key=lambda cpu: int(cpu["processor"])):
        pair = (cpu.get("physical id", "0"), cpu.get("core id", cpu["processor"]))
        first_cpus.setdefault(pair, int(cpu["processor"]))
    memory = _parse_meminfo(_read(root / "proc/meminfo"))
    return MachineFacts(
        architecture=platform.machine(),
        cpu_model=first.get("model name", platform.machine()),
        cpu_flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        num_cores=len(mine) or len(allowed),
        num_physical_cores=len(first_cpus) or len(allowed),
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),
        limit_bytes=memory_limit(root),
        nvidia_devices=_nvidia_devices(root),
        cpus=tuple(sorted(int(cpu["processor"]) for cpu in mine)) or tuple(sorted(allowed)),
        core_cpus=tuple(sorted(first_cpus.values())) or tuple(sorted(allowed)),
        cpu_quota=cpu_quota(root),
        memlock_bytes=_memlock_limit(_read(root / "proc/self/limits")),
        transparent_huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        free_huge_bytes=memory.get("HugePages_Free", 0) * memory.get("Hugepagesize", 0),
        kernel=_read(root / "proc/sys/kernel/osrelease").strip(),
    )


def _allowed_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parse_cpuinfo(text: str) -> list[dict[str, str]]:
    blocks = []
    for block in text.strip().split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        entry = {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
        if entry.get("processor", "").isdecimal():
            blocks.append(entry)
    return blocks


def _parse_meminfo(text: str) -> dict[str, int]:
    """Give sizes in bytes, and the entries without a unit as they are."""
    sizes = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return sizes


def _memlock_limit(limits: str) -> int | None:
    """Read the soft limit from /proc/self/limits; None if there is none or the file is not there."""
    for line in limits.splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdigit() else None
    return None


def _chosen(text: str) -> str:
    """Give the word in brackets of a line such as "always [madvise] never"."""
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), "")


def _nvidia_devices(root: Path) -> tuple[str, ...]:
    """Model names that the NVIDIA kernel driver reports, one per GPU; empty without the driver."""
    names = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(file).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    return tuple(names)
