"""Machines with something wrong, and the finding that must come of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from glm53srv.doctor.findings import Severity
from glm53srv.gpu_facts import GpuReport
from glm53srv.machine import GIB
from tests.pretended_machine import (
    GPU_VERSIONS,
    RTX_3090,
    SCALAR,
    PretendedProbe,
    server_machine,
    with_gpu,
)

MIB = 2**20

SKYLAKE_FLAGS = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw"})
"""Of a CPU with some of AVX-512, but not what our kernels need of it."""

ICE_LAKE_FLAGS = SKYLAKE_FLAGS | {"avx512vbmi", "avx512_vnni"}
"""Of a CPU with all that our kernels need of AVX-512."""


@dataclass(frozen=True, slots=True)
class Case:
    """A machine with something wrong; problem and remedy are parts of the finding called `finding`."""

    name: str
    finding: str
    severity: Severity
    problem: str
    remedy: str
    probe: Callable[[], PretendedProbe]
    arguments: tuple[str, ...] = ()


FATAL, WARN = Severity.FATAL, Severity.WARNING

WITH_GPU = (
    Case(
        "no memlock",
        "memlock",
        FATAL,
        "4 MiB may be locked, the experts need 8 MiB",
        "ulimit -l unlimited",
        lambda: with_gpu(RTX_3090, memlock_bytes=4 * MIB),
    ),
    Case(
        "no AVX2 in fast mode",
        "kernels",
        FATAL,
        "the CPU has no avx2, f16c",
        "use --mode exact",
        lambda: dataclasses.replace(with_gpu(RTX_3090, cpu_flags=frozenset({"fma"})), native=SCALAR),
    ),
    Case(
        "4 cores",
        "expert workers",
        WARN,
        "2 expert workers would take about 1.14 ms for an expert that the GPU reads in 0.40 ms",
        "use --mode exact",
        lambda: with_gpu(
            RTX_3090, num_cores=4, num_physical_cores=4, cpus=(0, 1, 2, 3), core_cpus=(0, 1, 2, 3)
        ),
        ("--threads", "4"),
    ),
    Case(
        "no GPU",
        "gpu",
        FATAL,
        "none: nvidia-smi is not there",
        "install the NVIDIA driver",
        lambda: PretendedProbe(server_machine(nvidia_devices=()), versions=GPU_VERSIONS),
    ),
    Case(
        "container without its GPU",
        "gpu",
        FATAL,
        "NVIDIA GeForce RTX 3090 is in the machine, but nvidia-smi is not there",
        "give the container its GPU",
        lambda: PretendedProbe(server_machine(), versions=GPU_VERSIONS),
    ),
    Case(
        "broken driver",
        "gpu",
        FATAL,
        "nvidia-smi failed with exit code 9",
        "install the NVIDIA driver",
        lambda: PretendedProbe(
            server_machine(), GpuReport(problem="nvidia-smi failed with exit code 9"), versions=GPU_VERSIONS
        ),
    ),
    Case(
        "old driver",
        "driver",
        FATAL,
        "driver 535.129.03 is older than 580",
        "install a driver 580 or newer",
        lambda: with_gpu(dataclasses.replace(RTX_3090, driver="535.129.03")),
    ),
    Case(
        "old GPU",
        "compute capability",
        FATAL,
        "has compute capability 7.5, the kernels need 8.0",
        "use an Ampere card or newer",
        lambda: with_gpu(dataclasses.replace(RTX_3090, compute_capability=(7, 5))),
    ),
    Case(
        "untried GPU",
        "compute capability",
        WARN,
        "10.0 is none of those the kernels are compiled for",
        "nobody has tried it",
        lambda: with_gpu(dataclasses.replace(RTX_3090, compute_capability=(10, 0))),
    ),
    Case(
        "PCIe x4",
        "link",
        WARN,
        "PCIe 4.0 x4, at most 7.9 GB/s",
        "put the card into a slot with 16 lanes",
        lambda: with_gpu(dataclasses.replace(RTX_3090, link_width=4)),
    ),
    Case(
        "PCIe 3.0, asleep",
        "link",
        WARN,
        "PCIe 3.0 x16 (generation 1 now), at most 15.8 GB/s",
        "a 4.0 x16 slot is faster",
        lambda: with_gpu(dataclasses.replace(RTX_3090, link_gen=1, link_gen_max=3)),
    ),
    Case(
        "two GPUs",
        "gpu count",
        WARN,
        "2 GPUs, only the first is used",
        "CUDA_VISIBLE_DEVICES",
        lambda: with_gpu(RTX_3090, dataclasses.replace(RTX_3090, index=1)),
    ),
    Case(
        "WSL",
        "wsl",
        WARN,
        "lets a process pin only a part of the memory",
        "run on Linux itself",
        lambda: with_gpu(RTX_3090, kernel="6.6.36.3-microsoft-standard-WSL2"),
    ),
    Case(
        "old exllamav3",
        "gpu software",
        FATAL,
        "exllamav3 1.4.6 is installed, 1.5.1 is the version",
        "pip install exllamav3==1.5.1",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "exllamav3": "1.4.6"}),
    ),
    Case(
        "no torch",
        "gpu software",
        FATAL,
        "torch not installed, there is triton 3.6.0, exllamav3 1.5.1: a GPU needs them",
        "pip install 'glm53srv[cuda]'",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "torch": None}),
    ),
    Case(
        "16 GB card for a context too long",
        "gpu memory",
        FATAL,
        "does not fit: VRAM: ",
        "use -cs ",
        lambda: with_gpu(dataclasses.replace(RTX_3090, free_bytes=4 * GIB)),
        ("-cs", "30000000"),
    ),
    Case(
        "a control group smaller than the process",
        "gpu memory",
        FATAL,
        "RAM: ",
        "add 1 GiB of RAM or free it",
        lambda: with_gpu(RTX_3090, limit_bytes=3 * GIB),
    ),
)

WITHOUT_GPU = (
    Case(
        "8 GB control group and a long context",
        "memory",
        FATAL,
        "(control group limit 8.0)",
        "use --cache-tokens ",
        lambda: PretendedProbe(server_machine(limit_bytes=8 * GIB)),
        ("-cs", "10000000"),
    ),
    Case(
        "no AVX2",
        "kernels",
        WARN,
        "the CPU has no avx2, fma, f16c: the scalar kernels are used",
        "use a CPU with AVX2",
        lambda: PretendedProbe(server_machine(cpu_flags=frozenset()), native=SCALAR),
    ),
    Case(
        "a build without AVX2",
        "kernels",
        WARN,
        "this build has no AVX2 kernels",
        "rebuild with python -m cffi_build",
        lambda: PretendedProbe(server_machine(), native=SCALAR),
    ),
    Case(
        "kernels asked for that are not there",
        "kernels",
        FATAL,
        "--isa avx512: the CPU has no avx512vbmi, avx512_vnni; there is scalar, avx2",
        "use --isa auto",
        lambda: PretendedProbe(server_machine(cpu_flags=SKYLAKE_FLAGS)),
        ("--isa", "avx512"),
    ),
    Case(
        "kernels asked for that were not built",
        "kernels",
        FATAL,
        "--isa avx512: this build has no AVX512 kernels; there is scalar, avx2",
        "use --isa auto",
        lambda: PretendedProbe(server_machine(cpu_flags=ICE_LAKE_FLAGS)),
        ("--isa", "avx512"),
    ),
    Case(
        "tiles asked for that are not there",
        "kernels",
        FATAL,
        "--isa amx: the CPU has no amx_tile, amx_int8; there is scalar, avx2",
        "use --isa auto",
        lambda: PretendedProbe(server_machine(cpu_flags=ICE_LAKE_FLAGS)),
        ("--isa", "amx"),
    ),
    Case(
        "tiles asked for that are refused",
        "kernels",
        FATAL,
        "--isa amx: this build has no AMX kernels, or Linux (5.16 or later grants it) or a sandbox refuses",
        "use --isa auto",
        lambda: PretendedProbe(server_machine(cpu_flags=ICE_LAKE_FLAGS | {"amx_tile", "amx_int8"})),
        ("--isa", "amx"),
    ),
    Case(
        "kernels not built",
        "kernels",
        FATAL,
        "the native kernels are not built",
        "python -m cffi_build",
        lambda: PretendedProbe(server_machine(), native=None),
    ),
    Case(
        "4 cores for 24 threads",
        "threads",
        WARN,
        "24 threads on 4 logical CPUs wait for each other",
        "use --threads 4",
        lambda: PretendedProbe(server_machine(num_cores=4, num_physical_cores=4)),
        ("--threads", "24"),
    ),
    Case(
        "a quota of two cores",
        "processor time",
        WARN,
        "the control group grants 2 cores of time and 22 threads would share them",
        "use --threads 2",
        lambda: PretendedProbe(server_machine(cpu_quota=2.0)),
    ),
    Case(
        "a GPU without the packages for it",
        "engine",
        WARN,
        "NVIDIA GeForce RTX 3090 is not used: torch is not installed",
        "the CPU engine serves",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "torch": None}),
    ),
    Case(
        "old driver of a GPU that is not needed",
        "driver",
        WARN,
        "driver 535.129.03 is older than 580",
        "install a driver 580 or newer",
        lambda: with_gpu(dataclasses.replace(RTX_3090, driver="535.129.03")),
        ("--engine", "cpu"),
    ),
    Case(
        "old exllamav3 that is not needed",
        "gpu software",
        WARN,
        "exllamav3 1.4.6 is installed",
        "pip install exllamav3==1.5.1",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "exllamav3": "1.4.6"}),
    ),
    Case(
        "CPUs of another machine, for workers that are not there",
        "expert workers",
        WARN,
        "GLM53_CT_CPUS names CPU 48, this process may use 0-47; nothing uses them here",
        "use GLM53_CT_CPUS=auto",
        lambda: PretendedProbe(server_machine()),
        ("--ct-cpus", "2-48"),
    ),
    Case(
        "heat in a directory that is not there",
        "heat",
        WARN,
        "no/such/folder/heat.npz cannot be written",
        "name a file in a directory of this user",
        lambda: PretendedProbe(server_machine()),
        ("--ec-heat", "no/such/folder/heat.npz"),
    ),
    Case(
        "a package is missing",
        "software",
        FATAL,
        "packages are not installed: llguidance",
        "pip install glm53srv again",
        lambda: PretendedProbe(server_machine(), versions={"llguidance": None}),
    ),
    Case(
        "a GPU asked for without the packages for it",
        "engine",
        FATAL,
        "--engine cuda: torch is not installed, exllamav3 is 1.6.5, not 1.5.1",
        "pip install 'glm53srv[cuda]'",
        lambda: dataclasses.replace(
            with_gpu(RTX_3090), versions={**GPU_VERSIONS, "torch": None, "exllamav3": "1.6.5"}
        ),
        ("--engine", "cuda"),
    ),
)
