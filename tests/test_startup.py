"""The line that says what is being served with what."""

from __future__ import annotations

import os
from pathlib import Path

from glm53srv.config import EngineConfig
from glm53srv.engine.base import EngineLimits
from glm53srv.kernels import Isa
from glm53srv.offload.calibrate import assume
from glm53srv.offload.cost import CostOverrides, default_costs
from glm53srv.offload.cost_ledger import CostLedger
from glm53srv.offload.report import OffloadCounts, OffloadReport
from glm53srv.startup import resident_bytes, summarise

LIMITS = EngineLimits(
    max_streams=3,
    max_context_tokens=65536,
    max_chunk_tokens=128,
    page_tokens=256,
    num_pages=16,
    num_layers=8,
    vocab_size=1000,
    eos_token_ids=(1,),
)


def test_the_line_tells_what_was_given_and_what_it_became() -> None:
    config = EngineConfig(Path("m"), threads=7, precision="fast16")
    line = summarise(config, "cpu", Isa.AVX2, LIMITS, 3 * 2**29)
    assert line == (
        "engine=cpu precision=fast16 isa=avx2 threads=7 offload=off streams=3 context_tokens=4096 "
        "cache_tokens=4096 chunk_tokens=128 ram_gib=1.50"
    )


def test_the_line_of_a_gpu_tells_mode_slots_and_its_memory() -> None:
    ledger = CostLedger(assume(default_costs(14), CostOverrides()), CostOverrides(), 8, "fast")
    report = OffloadReport(
        kind="cuda",
        mode="fast",
        num_slots=1376,
        num_resident=0,
        num_lent=0,
        hit_share=None,
        counts=OffloadCounts(),
        costs=ledger.report(1),
        crew_expert_ms=0.0,
        crew_threads=14,
        vram_bytes=21 * 2**30,
    )
    line = summarise(EngineConfig(Path("m")), "cuda", Isa.AVX2, LIMITS, 2**30, report)
    assert line.startswith("engine=cuda mode=fast slots=1376 vram_gib=21.00 threads=14 streams=3 ")


def test_resident_memory_is_that_of_this_process(tmp_path: Path) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    expected = pages * os.sysconf("SC_PAGE_SIZE")
    assert abs(resident_bytes() - expected) < expected / 10
    assert resident_bytes(tmp_path) == 0
