"""The one line that says what is being served with what, once it is loaded."""

from __future__ import annotations

from pathlib import Path

from glm53srv.config import EngineConfig
from glm53srv.engine.base import EngineLimits
from glm53srv.engine.factory import choose_engine
from glm53srv.kernels import Isa, cpu_features
from glm53srv.machine import MachineFacts

GIB = 2**30


def summarise(config: EngineConfig, engine_name: str, isa: Isa, limits: EngineLimits, ram_bytes: int) -> str:
    """Give what a person compares with what was asked for: key=value pairs on one line.

    engine_name: as the factory chose it. isa: of the kernels that run. ram_bytes: resident, with mapped
    weights. No mode and no GPU memory for the CPU engine, which has neither.
    """
    pairs = {
        "engine": engine_name,
        "precision": config.precision,
        "isa": isa.name.lower(),
        "threads": config.threads,
        "offload": config.offload.kind,
        "streams": limits.max_streams,
        "context_tokens": min(limits.max_context_tokens, limits.num_pages * limits.page_tokens),
        "cache_tokens": limits.num_pages * limits.page_tokens,
        "chunk_tokens": limits.max_chunk_tokens,
        "ram_gib": f"{ram_bytes / GIB:.2f}",
    }
    return " ".join(f"{key}={value}" for key, value in pairs.items())


def summarise_running(config: EngineConfig, machine: MachineFacts, limits: EngineLimits) -> str:
    """Give the line for the engine that load_engine() has just loaded here."""
    wanted = Isa[config.isa.upper()]
    isa = max(cpu_features().isas) if wanted is Isa.AUTO else wanted
    return summarise(config, choose_engine(config, machine).name, isa, limits, resident_bytes())


def resident_bytes(root: Path = Path("/")) -> int:
    """Give the resident memory of this process, 0 where /proc does not say."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
