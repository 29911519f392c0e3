"""Chooses an engine and loads it: the only place that knows them all. Heavy imports stay in its branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm53srv.config import EngineConfig
from glm53srv.engine.base import Engine
from glm53srv.errors import MachineError
from glm53srv.machine import MachineFacts
from glm53srv.progress import Progress

if TYPE_CHECKING:  # numpy and llguidance: not before the port is open
    from glm53srv.engine.grammar import GrammarCompiler

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
