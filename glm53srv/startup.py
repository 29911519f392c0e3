"""The one line that says what is being served with what, once it is loaded."""

from __future__ import annotations

from pathlib import Path

from glm53srv.config import EngineConfig
from glm53srv.engine.base import Engine, EngineLimits
from glm53srv.engine.factory import choose_engine
from glm53srv.kernels import Isa, cpu_features
from glm53srv.machine import MachineFacts
from glm53srv.offload.report import OffloadReport

GIB = 2**30


def summarise(
    config: EngineConfig,
    engine_name: str,
    isa: Isa,
    limits: EngineLimits,
    ram_bytes: int,
    offload: OffloadReport | None = None,
) -> str:
    """Give what a person compares with what was asked for: key=value pairs on one line.

    engine_name: as the factory chose it. isa: of the kernels that run. ram_bytes: resident, with mapped
    weights. offload: of an engine that has one. No mode and no GPU memory for the CPU engine, which has
    neither.
    """
    own: dict[str, object] = {
        "precision": config.precision,
        "isa": isa.name.lower(),
        "threads": config.threads,
        "offload": config.offload.kind,
    }
    if engine_name == "cuda" and offload is not None:
        own = {
            "mode": offload.mode,
            "slots": offload.num_slots,
            "vram_gib": f"{offload.vram_bytes / GIB:.2f}",
            "threads": offload.crew_threads,
        }
    pairs = {
        "engine": engine_name,
        **own,
        "streams": limits.max_streams,
        "context_tokens": min(limits.max_context_tokens, limits.num_pages * limits.page_tokens),
        "cache_tokens": limits.num_pages * limits.page_tokens,
        "chunk_tokens": limits.max_chunk_tokens,
        "ram_gib": f"{ram_bytes / GIB:.2f}",
    }
    return " ".join(f"{key}={value}" for key, value in pairs.items())


def summarise_running(config: EngineConfig, machine: MachineFacts, engine: Engine) -> str:
    """Give the line for the engine that load_engine() has just loaded here."""
    wanted = Isa[config.isa.upper()]
    isa = max(cpu_features().isas) if wanted is Isa.AUTO else wanted
    name = choose_engine(config, machine).name
    return summarise(config, name, isa, engine.limits, resident_bytes(), engine.offload_report)


def resident_bytes(root: Path = Path("/")) -> int:
    """Give the resident memory of this process, 0 where /proc does not say."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
