"""Machines for the virtual clock. Every constant names its source: measured, derived or assumed.

GFO is the published project 0xSero/glm53-flash-offload and its run records: RTX 3090 24 GB, EPYC 7443P with
22 CPU-lane threads, 8-channel DDR4, PCIe 4.0 x16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from glm53srv.offload.cost import CostModel


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One machine with an engine on it. Rates in GB/s (1e9 bytes), times in ms.

    fixed_ms: what a step costs outside the routed experts, by number of streams. zero_copy_gb_s: the GPU
    reading in place, alone on the link. copy_gb_s: the copy engine, alone. link_gb_s: both together.
    dram_gb_s: what RAM gives to CPU and link together. is_gpu_overlapped: the GPU computes experts from VRAM
    while others come over the link, instead of after them. is_copy_yielding: the copy engine pauses while
    the GPU reads in place (copies cut into matrices and released between layers). is_gathered: experts of the
    link are copied into VRAM and then computed from there, so zero_copy_gb_s is the copying alone. sources:
    one line per number.
    """

    name: str
    fixed_ms: Mapping[int, float]
    vram_expert_ms: float
    cpu_fixed_ms: float
    cpu_expert_ms: float
    zero_copy_gb_s: float
    copy_gb_s: float
    link_gb_s: float
    dram_gb_s: float
    num_slots: int
    is_gpu_overlapped: bool = False
    is_copy_yielding: bool = False
    is_gathered: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every constant is positive and says where it comes from. Raises ValueError."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str | bool) or entry.name == "sources":
                continue
            numbers = value.values() if isinstance(value, Mapping) else (value,)
            if not all(number > 0 for number in numbers):
                raise ValueError(f"profile {self.name}: {entry.name} must be positive")
            if entry.name not in self.sources:
                raise ValueError(f"profile {self.name}: {entry.name} has no source")

    def costs(self, expert_bytes: int) -> CostModel:
        """Return what an engine on this machine would measure at start."""
        return CostModel(
            cpu_fixed_ms=self.cpu_fixed_ms,
            cpu_expert_ms=self.cpu_expert_ms,
            zero_copy_ms=expert_bytes / (self.zero_copy_gb_s * 1e6),
            vram_expert_ms=self.vram_expert_ms,
            is_overlapped=self.is_gpu_overlapped,
        )

    def step_fixed_ms(self, num_streams: int) -> float:
        """Return fixed_ms for any number of streams: on a straight line between those given, level beyond."""
        known = sorted(self.fixed_ms)
        return float(np.interp(num_streams, known, [self.fixed_ms[count] for count in known]))

    def amended(self, name: str, source: str, changes: Mapping[str, object]) -> HardwareProfile:
        """Return a profile of another name with some fields replaced, all for one reason."""
        sources = {**self.sources, **dict.fromkeys(changes, source)}
        return replace(self, name=name, sources=sources, **changes)  # type: ignore[arg-type]  # named fields


RTX3090_TWO_COPIES = HardwareProfile(
    name="3090-two-copies",
    fixed_ms={1: 12.8, 2: 14.5, 4: 20.0},
    vram_expert_ms=0.034,
    cpu_fixed_ms=0.11,
    cpu_expert_ms=0.104,
    zero_copy_gb_s=23.6,
    copy_gb_s=25.0,
    link_gb_s=25.0,
    dram_gb_s=138.0,
    num_slots=1376,
    sources={
        "fixed_ms": "1 stream measured (GFO G067: 10.2 + 2.6); 2 and 4 derived from its speeds, closed form",
        "vram_expert_ms": "derived: 4.2 ms per token at 36 % hits (GFO G067)",
        "cpu_fixed_ms": "measured: GFO's cost model",
        "cpu_expert_ms": "measured: GFO's cost model, block-contiguous second copy",
        "zero_copy_gb_s": "measured in the running engine (GFO G067: 34.7 experts in 13.9 ms)",
        "copy_gb_s": "measured: 25 to 28, the lower end (GFO)",
        "link_gb_s": "assumed: no more than the copy engine alone",
        "dram_gb_s": "measured: 136 to 140 read (GFO)",
        "num_slots": "measured: fast, 131k tokens of cache (GFO)",
    },
)

RTX3090_ONE_COPY = RTX3090_TWO_COPIES.amended(
    "3090-one-copy",
    "derived: 0.150 ms per expert in the running engine on the native layout (run N137), "
    "taken at 4.27 experts per job, less the fixed part",
    {"cpu_expert_ms": 0.124},
)

RTX3090_SLOW_GATHER = RTX3090_ONE_COPY.amended(
    "3090-slow-gather",
    "measured: 14 to 14.5 GB/s gather while the CPU lane reads (GFO, one-copy engine); with it, its cost "
    "rule believing 0.40 ms, the replay agrees with the measured one-copy run N137",
    {"zero_copy_gb_s": 14.5},
)

RTX3090_EXACT = RTX3090_TWO_COPIES.amended(
    "3090-exact",
    "fixed part derived from GFO G066a at an assumed hit share, so its speed is no independent test; "
    "25 GB/s gather measured without a CPU lane",
    {"fixed_ms": {1: 14.0}, "zero_copy_gb_s": 25.0},
)

H200_AS_24GB = HardwareProfile(
    name="h200-as-24gb",
    fixed_ms={1: 8.0, 2: 9.0, 4: 12.0},
    vram_expert_ms=0.008,
    cpu_fixed_ms=0.11,
    cpu_expert_ms=0.187,
    zero_copy_gb_s=52.0,
    copy_gb_s=55.0,
    link_gb_s=55.0,
    dram_gb_s=114.0,
    num_slots=1376,
    sources={
        "fixed_ms": "assumed: a step captured in graphs; launched from Python it measured about 29 / 48 / 50",
        "vram_expert_ms": "assumed",
        "cpu_fixed_ms": "assumed as on GFO's machine",
        "cpu_expert_ms": "assumed: 14 threads at the 3.6 GB/s each that GFO's AVX2 lane reaches",
        "zero_copy_gb_s": "assumed: 95 % of the copy rate; about 53 measured without a CPU lane, Nov 2026",
        "copy_gb_s": "measured: registered memory, PCIe 5.0 x16 in a VM, Nov 2026",
        "link_gb_s": "assumed: no more than the copy engine alone",
        "dram_gb_s": "measured: 16 threads reading, still rising, so a lower bound, Nov 2026",
        "num_slots": "assumed as on the 3090",
    },
)

H200_GATHERED = H200_AS_24GB.amended(
    "h200-gathered",
    "measured in the engine at one stream, Nov 2026; fixed part at 2 and 4, RAM and slots assumed",
    {
        "fixed_ms": {1: 10.5, 2: 12.0, 4: 15.0},
        "vram_expert_ms": 0.004,
        "cpu_fixed_ms": 0.055,
        "cpu_expert_ms": 0.157,
        "zero_copy_gb_s": 9.437184 / 0.187,
        "copy_gb_s": 9.437184 / 0.174,
        "link_gb_s": 9.437184 / 0.174,
        "dram_gb_s": 200.0,
        "num_slots": 1344,
        "is_gathered": True,
    },
)

RTX3090_GATHERED = RTX3090_ONE_COPY.amended(
    "3090-gathered",
    "assumed: this project's landing buffers on the 3090 of the other profiles, 1,344 slots",
    {"num_slots": 1344, "is_gathered": True},
)

PROFILES: Mapping[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        RTX3090_TWO_COPIES,
        RTX3090_ONE_COPY,
        RTX3090_SLOW_GATHER,
        RTX3090_EXACT,
        H200_AS_24GB,
        H200_GATHERED,
        RTX3090_GATHERED,
    )
}
