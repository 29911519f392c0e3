"""Checks of processor, limits and installed packages."""

from __future__ import annotations

import platform

from glm53srv import __version__
from glm53srv.config import EngineConfig
from glm53srv.doctor.findings import Finding, fatal, ok, warn, wrap
from glm53srv.errors import ConfigError, MachineError
from glm53srv.machine import GIB, MachineFacts
from glm53srv.native_library import CpuFeatures, Isa
from glm53srv.offload.cost import CPU_EXPERT_MS_22_THREADS, ZERO_COPY_MS
from glm53srv.offload.device.cpus import choose_cpus, choose_threads, format_cpu_list
from glm53srv.probe import Probe

PACKAGES = ("numpy", "tokenizers", "starlette", "hypercorn", "uvloop", "orjson", "cffi", "llguidance")
GPU_PACKAGES = ("torch", "triton", "exllamav3")
EXLLAMAV3 = "1.5.1"
"""The one version whose inner seams the GPU side is written against."""

CPU_FLAGS = {
    Isa.AVX2: ("avx2", "fma", "f16c"),
    Isa.AVX512: ("avx512f", "avx512bw", "avx512vbmi", "avx512_vnni"),
    Isa.AMX: ("amx_tile", "amx_int8"),
}
"""What the kernels of an instruction set need besides those of the ones before it, by /proc/cpuinfo's names
(native/src/dispatch.c)."""

INSTALL = "pip install 'glm53srv[cuda]'"


def check_software(probe: Probe, needs_gpu: bool) -> list[Finding]:
    """Check the packages by their metadata; none is imported."""
    found = {name: probe.version(name) for name in PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    text = f"glm53srv {__version__}, Python {platform.python_version()}, {versions}"
    if missing:
        error = MachineError(f"packages are not installed: {', '.join(missing)}")
        return [
            fatal("software", error, "pip install glm53srv again"),
            *_check_gpu_packages(probe, needs_gpu),
        ]
    return [ok("software", text), *_check_gpu_packages(probe, needs_gpu)]


def _check_gpu_packages(probe: Probe, needs_gpu: bool) -> list[Finding]:
    found = {name: probe.version(name) for name in GPU_PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    if missing:
        lack = f"{', '.join(missing)} not installed" + (f", there is {text}" if text else "")
        if needs_gpu:
            return [fatal("gpu software", MachineError(f"{lack}: a GPU needs them"), INSTALL)]
        return [ok("gpu software", f"{lack}; the CPU engine needs none of them")]
    exllamav3 = found["exllamav3"]
    if exllamav3 != EXLLAMAV3:
        text = (
            f"exllamav3 {exllamav3} is installed, {EXLLAMAV3} is the version the GPU side is written against"
        )
        remedy = f"pip install exllamav3=={EXLLAMAV3}"
        if needs_gpu:
            return [fatal("gpu software", MachineError(text), remedy)]
        return [warn("gpu software", text, remedy)]
    return [ok("gpu software", text)]


def check_processor(config: EngineConfig, machine: MachineFacts, needs_gpu: bool) -> list[Finding]:
    """Check cores, quota and threads."""
    cpus = f" ({format_cpu_list(machine.cpus)})" if machine.cpus else ""
    cores = f"{machine.num_physical_cores} physical cores, {machine.num_cores} logical CPUs usable{cpus}"
    found = [ok("processor", f"{machine.cpu_model}, {cores}, {config.threads} threads")]
    quota = machine.cpu_quota
    if quota is not None and quota < config.threads:
        text = (
            f"the control group grants {quota:g} cores of time and {config.threads} threads would share them"
        )
        found.append(warn("processor time", text, f"raise the limit, or use --threads {max(1, int(quota))}"))
    if config.threads > machine.num_cores:
        text = f"{config.threads} threads on {machine.num_cores} logical CPUs wait for each other"
        found.append(warn("threads", text, f"use --threads {machine.num_physical_cores}"))
    return found + _check_crew(config, machine, needs_gpu)


def _check_crew(config: EngineConfig, machine: MachineFacts, needs_gpu: bool) -> list[Finding]:
    """Check the expert workers' CPUs, and say so where they are too slow to help a GPU.

    The cost model then sends them little or nothing.
    """
    given = config.offload
    try:
        threads = choose_threads(given.ct_threads, choose_cpus(given.ct_cpus, machine))
    except ConfigError as error:
        remedy = "use GLM53_CT_CPUS=auto"
        if needs_gpu or given.kind != "off":
            return [fatal("expert workers", error, remedy)]
        return [warn("expert workers", f"{error}; nothing uses them here", remedy)]
    if not needs_gpu or config.mode != "fast":
        return []
    expert_ms = given.ct_b_ms or CPU_EXPERT_MS_22_THREADS * 22 / threads
    link_ms = given.ct_tzc_ms or ZERO_COPY_MS
    if expert_ms < link_ms:
        return []
    text = (
        f"{threads} expert workers would take about {expert_ms:.2f} ms for an expert that the GPU reads in "
        f"{link_ms:.2f} ms, so fast mode will be little faster than exact"
    )
    return [warn("expert workers", text, "use --mode exact, or a processor with more cores")]


def check_kernels(config: EngineConfig, probe: Probe, machine: MachineFacts, needs_gpu: bool) -> Finding:
    """Check the instruction set and the native build."""
    try:
        features = probe.features()
    except MachineError as error:
        return wrap("kernels", error)
    tiers = ", ".join(isa.name.lower() for isa in features.isas)
    wanted = Isa[config.isa.upper()]
    if wanted is not Isa.AUTO and wanted not in features.isas:
        text = f"--isa {config.isa}: {_why_not(wanted, machine)}; there is {tiers}"
        return fatal("kernels", MachineError(text), "use --isa auto")
    if max(features.isas) is Isa.SCALAR:
        why = _why_not(Isa.AVX2, machine)
        if needs_gpu and config.mode == "fast":
            return fatal("kernels", MachineError(f"{why}: its expert workers need them"), "use --mode exact")
        lacking = _lacking_flags(Isa.AVX2, machine)
        remedy = "use a CPU with AVX2, FMA and F16C" if lacking else "rebuild with python -m cffi_build"
        return warn("kernels", f"{why}: the scalar kernels are used, which are many times slower", remedy)
    return ok("kernels", f"{tiers}{_missed(features, machine)}{_build_mode(features)}")


def _missed(features: CpuFeatures, machine: MachineFacts) -> str:
    """Say why the next better kernels are not there; AMX is missed only by a CPU that has it."""
    if Isa.AVX512 not in features.isas:
        return f" (not avx512: {_why_not(Isa.AVX512, machine)})"
    if Isa.AMX not in features.isas and not _lacking_flags(Isa.AMX, machine):
        return f" (not amx: {_why_not(Isa.AMX, machine)})"
    return ""


def _lacking_flags(isa: Isa, machine: MachineFacts) -> list[str]:
    needed = [flag for known, flags in CPU_FLAGS.items() if known <= isa for flag in flags]
    return [flag for flag in needed if flag not in machine.cpu_flags]


def _why_not(isa: Isa, machine: MachineFacts) -> str:
    lacking = _lacking_flags(isa, machine)
    if lacking:
        return f"the CPU has no {', '.join(lacking)}"
    if isa is Isa.AMX:
        return (
            "this build has no AMX kernels, or Linux (5.16 or later grants it) or a sandbox refuses its use"
        )
    return f"this build has no {isa.name} kernels"


def _build_mode(features: CpuFeatures) -> str:
    return "" if features.mode == "api" else ", through cffi's ABI mode (no Python.h when they were built)"


def check_ram(machine: MachineFacts) -> Finding:
    """Tell how much memory there is, and what a control group leaves of it."""
    limit = "no control group limit"
    if machine.limit_bytes is not None:
        limit = f"control group limit {machine.limit_bytes / GIB:.1f}"
    total, available = machine.total_bytes / GIB, machine.available_bytes / GIB
    return ok("ram", f"{total:.1f} GiB, {available:.1f} available, {limit}")


def check_memlock(machine: MachineFacts, pinned_bytes: int, needs_gpu: bool) -> Finding:
    """Check that the experts may be pinned. pinned_bytes: size of the arena; 0: not known."""
    limit = machine.memlock_bytes
    if limit is None:
        return ok("memlock", "memory may be locked without limit")
    text = f"{_size(limit)} may be locked"
    if not needs_gpu:
        return ok("memlock", f"{text}; the CPU engine locks nothing")
    if limit >= pinned_bytes > 0:
        return ok("memlock", f"{text}, {_size(pinned_bytes)} needed")
    remedy = (
        "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 of "
        "a container"
    )
    return fatal("memlock", MachineError(f"{text}, the experts need {_size(pinned_bytes)}"), remedy)


def check_huge_pages(machine: MachineFacts, is_large: bool) -> Finding:
    """Check huge pages, which matter for a model of many gigabytes."""
    mode = machine.transparent_huge_pages
    pool = f"{machine.free_huge_bytes / GIB:.1f} GiB free in the hugetlb pool"
    if mode in ("always", "madvise"):
        return ok("huge pages", f"transparent huge pages: {mode}; {pool}")
    text = f"transparent huge pages: {mode or 'not in this kernel'}; {pool}"
    if not is_large or machine.free_huge_bytes:
        return ok("huge pages", text)
    remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return warn("huge pages", f"{text}: reading the experts costs more", remedy)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
