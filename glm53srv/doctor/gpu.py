"""Checks of the GPU, its driver and its link."""

from __future__ import annotations

from glm53srv.doctor.findings import Finding, fatal, ok, warn
from glm53srv.errors import MachineError
from glm53srv.gpu_facts import GpuFacts, GpuReport
from glm53srv.machine import GIB, MachineFacts

LEAST_DRIVER = (580, 0)
"""CUDA 13's oldest driver (NVIDIA, CUDA Compatibility, minor version compatibility, table 1)."""

LEAST_CAPABILITY = (8, 0)
"""Ampere: older cards do not compute in bfloat16, in which exllamav3 keeps the convolutions' columns."""

COMPILED_FOR = ((8, 6), (8, 9), (9, 0), (12, 0))
"""Compute capabilities that the tests compile our own kernels for."""

GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane in one direction by PCIe generation, after line coding (PCI-SIG)."""

FULL_GEN, FULL_WIDTH = 4, 16


def check_gpus(report: GpuReport, machine: MachineFacts, needs_gpu: bool) -> list[Finding]:
    """Check the first GPU, and count the others. needs_gpu: an engine was chosen that cannot do without."""
    if not report.gpus:
        return [_no_gpu(report, machine, needs_gpu)]
    gpu = report.gpus[0]
    total = "unknown VRAM" if gpu.total_bytes is None else f"{gpu.total_bytes / GIB:.1f} GiB"
    free = "" if gpu.free_bytes is None else f", {gpu.free_bytes / GIB:.1f} free"
    capability = "" if gpu.compute_capability is None else f", compute capability {_dotted(gpu)}"
    found = [ok("gpu", f"{gpu.name}, {total}{free}{capability}, driver {gpu.driver}")]
    found += _check_driver(gpu, needs_gpu)
    found += _check_capability(gpu, needs_gpu)
    found += _check_link(gpu)
    if len(report.gpus) > 1:
        text = f"{len(report.gpus)} GPUs, only the first is used"
        found.append(warn("gpu count", text, "choose it with CUDA_VISIBLE_DEVICES=N or --gpus device=N"))
    if machine.is_wsl:
        text = "Linux under Windows (WSL) lets a process pin only a part of the memory"
        found.append(warn("wsl", text, "run on Linux itself if pinning the experts fails"))
    return found


def _no_gpu(report: GpuReport, machine: MachineFacts, needs_gpu: bool) -> Finding:
    names = ", ".join(machine.nvidia_devices)
    text = f"{names} is in the machine, but {report.problem}" if names else f"none: {report.problem}"
    remedy = "install the NVIDIA driver, give the container its GPU (--gpus), or use --engine cpu"
    if needs_gpu:
        return fatal("gpu", MachineError(text), remedy)
    return warn("gpu", text, remedy) if names else ok("gpu", text)


def _check_driver(gpu: GpuFacts, needs_gpu: bool) -> list[Finding]:
    words = gpu.driver.split(".")
    if not all(word.isdigit() for word in words) or tuple(map(int, words)) >= LEAST_DRIVER:
        return []
    text = f"driver {gpu.driver} is older than {LEAST_DRIVER[0]}, which CUDA 13 needs"
    return [_graded("driver", text, f"install a driver {LEAST_DRIVER[0]} or newer", needs_gpu)]


def _check_capability(gpu: GpuFacts, needs_gpu: bool) -> list[Finding]:
    capability = gpu.compute_capability
    if capability is None or capability in COMPILED_FOR:
        return []
    if capability < LEAST_CAPABILITY:
        text = f"{gpu.name} has compute capability {_dotted(gpu)}, the kernels need 8.0"
        return [
            _graded("compute capability", text, "use an Ampere card or newer, or --engine cpu", needs_gpu)
        ]
    known = ", ".join(f"{major}.{minor}" for major, minor in COMPILED_FOR)
    text = f"{_dotted(gpu)} is none of those the kernels are compiled for in the tests ({known})"
    return [warn("compute capability", text, "report what happens; nobody has tried it")]


def _check_link(gpu: GpuFacts) -> list[Finding]:
    gen, width = gpu.link_gen_max or gpu.link_gen, gpu.link_width
    if gen is None or width is None:
        return [ok("link", "the driver does not tell generation and width of the PCIe link")]
    now = f" (generation {gpu.link_gen} now)" if gpu.link_gen not in (None, gen) else ""
    rate = GB_PER_LANE.get(gen, 0.0) * width
    text = f"PCIe {gen}.0 x{width}{now}, at most {rate:.1f} GB/s"
    if width < FULL_WIDTH and (gpu.link_width_max or width) > width:
        remedy = f"put the card into a slot with {gpu.link_width_max} lanes, or set the slot so in the BIOS"
        return [
            warn("link", f"{text}: the card could use x{gpu.link_width_max}, and misses wait for it", remedy)
        ]
    if width < FULL_WIDTH or gen < FULL_GEN:
        return [warn("link", f"{text}: experts that are not in VRAM come slowly", "a 4.0 x16 slot is faster")]
    return [ok("link", text)]


def _graded(name: str, text: str, remedy: str, needs_gpu: bool) -> Finding:
    """Give a fatal finding where the GPU is needed, a warning where it would be."""
    return fatal(name, MachineError(text), remedy) if needs_gpu else warn(name, text, remedy)


def _dotted(gpu: GpuFacts) -> str:
    return ".".join(map(str, gpu.compute_capability or ()))
