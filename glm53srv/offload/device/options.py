"""How an offload is built: plain values, importable without the native library."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm53srv.offload.cost import CostOverrides, Mode
from glm53srv.offload.device.heat_keeper import HeatOptions
from glm53srv.offload.offers import NUM_OFFERS
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.staging import STAGE_MIN_PICKS
from glm53srv.offload.vram_plan import VramOptions


def _residency() -> ResidencyParams:
    return ResidencyParams(num_offers=NUM_OFFERS)


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Sizes and knobs of a simulated offload.

    crew_threads, crew_cpus, crew_isa: of the CPU workers; crew_isa names a kernels.Isa. vram: its max_slots
    is the size of the cache; None takes an eighth of all experts. chunk_slots: slots lent together; None
    takes an eighth of the cache. stage_min_picks: picks per layer from which a chunk is staged; None scales
    the threshold of a layer of 288 experts. copies_per_step: admissions per decode step and what the copy
    engine moves beside it; None takes what the measured rate allows, and then runs do not repeat.
    calibrate_s: time that measuring the costs may take at start; 0 takes the defaults. cpu_prefill_tokens:
    longest chunk of a prompt of which the CPU computes a part, on a GPU in fast mode; 0 for none.
    splits_experts: one expert of a decode layer may be shared between link and CPU, in fast mode.
    """

    crew_threads: int = 1
    crew_cpus: tuple[int, ...] | None = None
    crew_isa: str = "AUTO"
    mode: Mode = "fast"
    costs: CostOverrides = field(default_factory=CostOverrides)
    vram: VramOptions = field(default_factory=VramOptions)
    residency: ResidencyParams = field(default_factory=_residency)
    chunk_slots: int | None = None
    stage_min_picks: int | None = None
    copies_per_step: int | None = None
    deadline_ms: int = 1500
    calibrate_s: float = 1.0
    cpu_prefill_tokens: int = 0
    splits_experts: bool = True
    heat: HeatOptions = field(default_factory=HeatOptions)

    def min_picks(self, num_experts: int) -> int:
        """Give the threshold of staging for a layer of num_experts."""
        return self.stage_min_picks or -(-STAGE_MIN_PICKS * num_experts // 288)
