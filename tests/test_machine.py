"""Machine facts come from files, so that any machine can be laid out in a folder."""

from __future__ import annotations

from pathlib import Path

from glm53srv.machine import read_machine

CPUINFO = """processor\t: {0}
model name\t: Test CPU
flags\t\t: fpu avx2 fma f16c
physical id\t: 0
core id\t\t: {1}
"""


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_hyperthreads_count_as_one_physical_core(tmp_path: Path) -> None:
    text = "\n".join(CPUINFO.format(i, i // 2) for i in range(4))
    facts = read_machine(lay_out(tmp_path, {"proc/cpuinfo": text}), cores=frozenset(range(4)))
    assert (facts.num_cores, facts.num_physical_cores) == (4, 2)
    assert facts.cpu_model == "Test CPU"
    assert {"avx2", "fma", "f16c"} <= facts.cpu_flags


def test_only_cores_of_the_affinity_mask_count(tmp_path: Path) -> None:
    text = "\n".join(CPUINFO.format(i, i) for i in range(8))
    facts = read_machine(lay_out(tmp_path, {"proc/cpuinfo": text}), cores=frozenset({2, 5}))
    assert (facts.num_cores, facts.num_physical_cores) == (2, 2)


def test_the_smallest_control_group_limit_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "4096\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    facts = read_machine(lay_out(tmp_path, files), cores=frozenset({0}))
    assert facts.limit_bytes == 4096
    assert facts.usable_bytes == 4096


def test_no_limit_leaves_what_is_available(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    facts = read_machine(lay_out(tmp_path, files), cores=frozenset({0}))
    assert facts.limit_bytes is None
    assert facts.usable_bytes == 900 * 1024


def test_gpus_are_named_by_the_driver(tmp_path: Path) -> None:
    files = {
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA GeForce RTX 3090\nIRQ: 1\n"
    }
    assert read_machine(lay_out(tmp_path, files)).nvidia_devices == ("NVIDIA GeForce RTX 3090",)


def test_an_empty_machine_raises_nothing(tmp_path: Path) -> None:
    facts = read_machine(tmp_path, cores=frozenset({0}))
    assert (facts.num_cores, facts.total_bytes, facts.limit_bytes) == (1, 0, None)


def test_this_machine_has_cores_and_memory() -> None:
    facts = read_machine()
    assert facts.num_physical_cores >= 1
    assert facts.total_bytes > 2**28


def test_a_version_1_group_below_the_mount_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/pods/a\n1:cpu,cpuacct:/pods/a\n0::/\n",
        "sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes": "8589934592\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/pods/a/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/pods/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    facts = read_machine(lay_out(tmp_path, files), cores=frozenset({0}))
    assert (facts.limit_bytes, facts.cpu_quota) == (2**33, 1.5)


def test_the_smallest_quota_of_version_2_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    }
    assert read_machine(lay_out(tmp_path, files), cores=frozenset({0})).cpu_quota == 4.0


def test_limits_and_pages_are_read(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": "Limit  Soft Limit  Units\nMax locked memory   8388608   unlimited   bytes\n",
        "proc/meminfo": "HugePages_Total: 9\nHugePages_Free: 4\nHugepagesize: 2048 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "proc/sys/kernel/osrelease": "6.6.36.3-microsoft-standard-WSL2\n",
    }
    facts = read_machine(lay_out(tmp_path, files), cores=frozenset({0}))
    assert facts.memlock_bytes == 8 * 2**20
    assert facts.free_huge_bytes == 4 * 2 * 2**20
    assert facts.transparent_huge_pages == "never"
    assert facts.is_wsl


def test_unlimited_memlock_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n"
    }
    assert read_machine(lay_out(tmp_path, files), cores=frozenset({0})).memlock_bytes is None
