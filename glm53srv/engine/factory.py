"""Chooses an engine and loads it: the only place that knows them all. Heavy imports stay in its branches."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm53srv.config import EngineConfig
from glm53srv.engine.base import Engine
from glm53srv.errors import MachineError
from glm53srv.machine import MachineFacts
from glm53srv.progress import Progress

if TYPE_CHECKING:  # numpy and llguidance: not before the port is open
    from glm53srv.engine.grammar import GrammarCompiler
    from glm53srv.offload.device.options import OffloadOptions

logger = logging.getLogger(__name__)

CPU_CHUNK_TOKENS = 512
"""Prefill chunk of the CPU engine: long enough to share the decoding of tiles, short enough for caches."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine runs, and the reason in one line."""

    name: str
    reason: str


def choose_engine(config: EngineConfig, machine: MachineFacts) -> EngineChoice:
    """Pick the engine. Raises MachineError when the one that was asked for cannot run here."""
    gpus = ", ".join(machine.nvidia_devices)
    if config.engine == "cuda":
        raise MachineError("--engine cuda: this version has no CUDA engine; use --engine cpu")
    if config.engine == "cpu":
        return EngineChoice("cpu", "asked for by --engine")
    if gpus:
        return EngineChoice("cpu", f"{gpus} is not used: this version has no CUDA engine")
    return EngineChoice("cpu", "no NVIDIA GPU was found")


def load_engine(
    config: EngineConfig, machine: MachineFacts, progress: Progress, grammars: GrammarCompiler | None = None
) -> Engine:
    """Load and warm up the chosen engine on the calling thread, the engine thread from then on.

    progress: fraction 0..1 and stage. grammars: compiles the constraints of requests. Raises CheckpointError
    or MachineError, one line.
    """
    choose_engine(config, machine)
    from glm53srv.engine.cpu import CpuEngine, EngineOptions
    from glm53srv.kernels import Isa, Precision

    options = EngineOptions(
        max_streams=config.max_streams,
        cache_tokens=config.cache_tokens,
        max_chunk_tokens=config.chunk_tokens or CPU_CHUNK_TOKENS,
        num_threads=config.threads,
        isa=Isa[config.isa.upper()],
        precision=Precision[config.precision.upper()],
        offload=_offload_options(config, machine),
    )
    engine = CpuEngine.load(
        config.model_dir, options, lambda part, stage: progress(part * 0.9, stage), grammars
    )
    progress(0.9, "warming up")
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    progress(1.0, "ready")
    return engine


def _offload_options(config: EngineConfig, machine: MachineFacts) -> OffloadOptions | None:
    """Give how the offload is built, or None without one. Raises ConfigError for CPUs that are not ours."""
    given = config.offload
    if given.ct_swz is not None:
        logger.info("GLM53_CT_SWZ=%s is ignored: the experts have one copy in one layout", given.ct_swz)
    if given.kind == "off":
        return None
    from glm53srv.offload.cost import CostOverrides
    from glm53srv.offload.device.cpus import choose_cpus, choose_threads
    from glm53srv.offload.device.heat_keeper import HeatOptions
    from glm53srv.offload.device.options import OffloadOptions
    from glm53srv.offload.vram_plan import VramOptions

    cpus = choose_cpus(given.ct_cpus, machine)
    options = OffloadOptions(
        crew_threads=choose_threads(given.ct_threads, cpus),
        crew_cpus=cpus,
        mode="exact" if config.mode == "exact" else "fast",
        costs=CostOverrides(given.ct_a_ms, given.ct_b_ms, given.ct_tzc_ms),
        vram=VramOptions(given.reserve_gib, given.stage_gib, given.elastic_gib, given.max_slots),
        heat=HeatOptions(given.heat_path, given.heat_interval_s),
    )
    logger.info("offload kind=%s cpus=%s threads=%d", given.kind, cpus, options.crew_threads)
    return options
