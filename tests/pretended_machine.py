"""A machine that a test describes, for the checks that would look at the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm53srv.errors import MachineError
from glm53srv.gpu_facts import GpuFacts, GpuReport
from glm53srv.machine import GIB, MachineFacts, read_machine
from glm53srv.native_library import CpuFeatures, Isa
from glm53srv.packages import package_version

RTX_3090 = GpuFacts(
    index=0,
    name="NVIDIA GeForce RTX 3090",
    driver="610.57.04",
    compute_capability=(8, 6),
    total_bytes=24 * GIB,
    free_bytes=24 * GIB - 310 * 2**20,
    link_gen=4,
    link_gen_max=4,
    link_width=16,
    link_width_max=16,
)
"""A card that nothing is wrong with."""

GPU_VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "exllamav3": "1.5.1"}
AVX2 = CpuFeatures((Isa.SCALAR, Isa.AVX2), "api", "_kernels.so")
SCALAR = CpuFeatures((Isa.SCALAR,), "api", "_kernels.so")


def this_machine(**changes: object) -> MachineFacts:
    """Give the machine the tests run on, with some facts replaced."""
    return dataclasses.replace(read_machine(), **changes)  # type: ignore[arg-type]  # a test names its own fields


def server_machine(**changes: object) -> MachineFacts:
    """Give a 24-core machine with 256 GiB, with some facts replaced."""
    facts = MachineFacts(
        architecture="x86_64",
        cpu_model="Test CPU",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        num_cores=48,
        num_physical_cores=24,
        total_bytes=256 * GIB,
        available_bytes=250 * GIB,
        limit_bytes=None,
        nvidia_devices=("NVIDIA GeForce RTX 3090",),
        cpus=tuple(range(48)),
        core_cpus=tuple(range(24)),
        transparent_huge_pages="madvise",
        kernel="6.8.0-generic",
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]  # a test names its own fields


@dataclass(slots=True)
class PretendedProbe:
    """Answers what it was built with.

    versions: packages that differ from what is installed here; None: absent. native: None says that the
    kernels are not built. questions: what was asked for, in order.
    """

    machine: MachineFacts
    gpu_report: GpuReport = field(default_factory=lambda: GpuReport(problem="nvidia-smi is not there"))
    native: CpuFeatures | None = AVX2
    versions: Mapping[str, str | None] = field(default_factory=dict)
    rate: float | None = None
    questions: list[str] = field(default_factory=list)

    def facts(self) -> MachineFacts:
        return self.machine

    def gpus(self) -> GpuReport:
        self.questions.append("gpus")
        return self.gpu_report

    def features(self) -> CpuFeatures:
        if self.native is None:
            raise MachineError("the native kernels are not built; build them with: python -m cffi_build")
        return self.native

    def version(self, package: str) -> str | None:
        return self.versions[package] if package in self.versions else package_version(package)

    def read_rate(self, path: Path) -> float | None:
        self.questions.append("read_rate")
        return self.rate


def with_gpu(*gpus: GpuFacts, **changes: object) -> PretendedProbe:
    """Give a server machine with these cards and the packages they need."""
    return PretendedProbe(server_machine(**changes), GpuReport(gpus), versions=GPU_VERSIONS)
