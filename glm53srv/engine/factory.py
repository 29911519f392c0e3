"""Chooses an engine and loads it: the only place that knows them all. Heavy imports stay in its branches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm53srv.config import EngineConfig
from glm53srv.engine.base import Engine
from glm53srv.errors import ConfigError, MachineError
from glm53srv.machine import MachineFacts
from glm53srv.packages import package_version
from glm53srv.progress import Progress

if TYPE_CHECKING:  # numpy and llguidance: not before the port is open
    from glm53srv.engine.grammar import GrammarCompiler
    from glm53srv.offload.device.options import OffloadOptions

logger = logging.getLogger(__name__)

CPU_CHUNK_TOKENS = 512
"""Prefill chunk of the CPU engine: long enough to share the decoding of tiles, short enough for caches."""
CUDA_CHUNK_TOKENS = 8192
"""Prefill chunk of the CUDA engine: each reads all experts over the link, so it is long."""
CUDA_MAX_STREAMS = 8
"""Rows that exllamav3's decode kernels take together."""

CUDA_PACKAGES = {"torch": None, "triton": None, "exllamav3": "1.5.1"}
"""What the CUDA engine needs, and the version it needs exactly, or None."""

VersionLookup = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine runs, and the reason in one line."""

    name: str
    reason: str


def choose_engine(
    config: EngineConfig, machine: MachineFacts, version: VersionLookup = package_version
) -> EngineChoice:
    """Pick the engine. version: of an installed package, or None.

    Raises MachineError when the engine that was asked for cannot run here.
    """
    gpus = ", ".join(machine.nvidia_devices)
    lack = _missing_packages(version)
    if config.engine == "cpu":
        return EngineChoice("cpu", "asked for by --engine")
    if config.engine == "cuda":
        require_cuda(machine, "--engine cuda", version, ", or use --engine cpu")
        return EngineChoice("cuda", f"asked for by --engine, on {gpus}")
    if not gpus:
        return EngineChoice("cpu", "no NVIDIA GPU was found")
    if lack:
        return EngineChoice("cpu", f"{gpus} is not used: {lack}; {CUDA_REMEDY}")
    return EngineChoice("cuda", f"found {gpus}")


def require_cuda(
    machine: MachineFacts, what: str, version: VersionLookup = package_version, otherwise: str = ""
) -> None:
    """Raise MachineError, one line, if there is no GPU or a package for it is missing.

    what: asked for it. otherwise: what one can do without a GPU.
    """
    if not machine.nvidia_devices:
        raise MachineError(f"{what}: no NVIDIA GPU was found; give a container one (--gpus){otherwise}")
    if lack := _missing_packages(version):
        raise MachineError(f"{what}: {lack}; {CUDA_REMEDY}")


CUDA_REMEDY = "pip install 'glm53srv[cuda]' adds the GPU's packages"


def _missing_packages(version: VersionLookup) -> str:
    """Say what the CUDA engine lacks, or nothing."""
    lacks = []
    for name, wanted in CUDA_PACKAGES.items():
        found = version(name)
        if found is None:
            lacks.append(f"{name} is not installed")
        elif wanted is not None and found != wanted:
            lacks.append(f"{name} is {found}, not {wanted}")
    return ", ".join(lacks)


def load_engine(
    config: EngineConfig, machine: MachineFacts, progress: Progress, grammars: GrammarCompiler | None = None
) -> Engine:
    """Load and warm up the chosen engine on the calling thread, the engine thread from then on.

    progress: fraction 0..1 and stage. grammars: compiles the constraints of requests. Raises CheckpointError
    or MachineError, one line.
    """
    choice = choose_engine(config, machine)
    if config.offload.ct_swz is not None:
        logger.info("GLM53_CT_SWZ=%s is ignored: there is one layout of the experts", config.offload.ct_swz)
    load = _load_cuda if choice.name == "cuda" else _load_cpu
    engine = load(config, machine, lambda part, stage: progress(part * 0.9, stage), grammars)
    progress(0.9, "warming up")
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    progress(1.0, "ready")
    return engine


def _load_cpu(
    config: EngineConfig, machine: MachineFacts, progress: Progress, grammars: GrammarCompiler | None
) -> Engine:
    from glm53srv.engine.cpu import CpuEngine, EngineOptions
    from glm53srv.kernels import Isa, Precision

    options = EngineOptions(
        max_streams=config.max_streams,
        cache_tokens=config.cache_tokens,
        max_chunk_tokens=config.chunk_tokens or CPU_CHUNK_TOKENS,
        num_threads=config.threads,
        isa=Isa[config.isa.upper()],
        precision=Precision[config.precision.upper()],
        offload=None if config.offload.kind == "off" else _offload_options(config, machine),
    )
    return CpuEngine.load(config.model_dir, options, progress, grammars)


def _load_cuda(
    config: EngineConfig, machine: MachineFacts, progress: Progress, grammars: GrammarCompiler | None
) -> Engine:
    from glm53srv.engine.cuda.engine import CudaEngine
    from glm53srv.engine.cuda.loading import CudaOptions

    if config.max_streams > CUDA_MAX_STREAMS:
        raise ConfigError(
            f"--max-streams {config.max_streams}: the CUDA engine decodes at most {CUDA_MAX_STREAMS} together"
        )
    vram_gib = config.offload.vram_gib
    options = CudaOptions(
        _offload_options(config, machine),
        max_streams=config.max_streams,
        cache_tokens=config.cache_tokens,
        max_chunk_tokens=config.chunk_tokens or CUDA_CHUNK_TOKENS,
        vram_bytes=None if vram_gib is None else int(vram_gib * 2**30),
        tuning_dir=config.tuning_dir,
        graphs=config.cuda_graphs,
    )
    return CudaEngine.load(config.model_dir, options, machine, progress, grammars)


def _offload_options(config: EngineConfig, machine: MachineFacts) -> OffloadOptions:
    """Give how the offload is built. Raises ConfigError for CPUs that are not ours."""
    given = config.offload
    from glm53srv.offload.cost import CostOverrides
    from glm53srv.offload.device.cpus import choose_cpus, choose_threads
    from glm53srv.offload.device.heat_keeper import HeatOptions
    from glm53srv.offload.device.options import OffloadOptions
    from glm53srv.offload.vram_plan import VramOptions

    cpus = choose_cpus(given.ct_cpus, machine)
    options = OffloadOptions(
        crew_threads=choose_threads(given.ct_threads, cpus),
        crew_cpus=cpus,
        cpu_prefill_tokens=given.ct_prefill,
        splits_experts=given.ct_split == "parts",
        mode="exact" if config.mode == "exact" else "fast",
        costs=CostOverrides(given.ct_a_ms, given.ct_b_ms, given.ct_tzc_ms),
        vram=VramOptions(
            given.reserve_gib, given.stage_gib, given.elastic_gib, given.max_slots, given.landing, given.ahead
        ),
        heat=HeatOptions(given.heat_path, given.heat_interval_s),
    )
    logger.info("offload kind=%s cpus=%s threads=%d", given.kind, cpus, options.crew_threads)
    return options
