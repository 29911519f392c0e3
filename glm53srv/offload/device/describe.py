"""The report that every offload gives, from the parts that all of them have."""

from __future__ import annotations

from glm53srv.offload.cost_ledger import CostLedger
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.device.crew import CrewStats
from glm53srv.offload.device.heat_keeper import HeatKeeper
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.report import OffloadReport
from glm53srv.offload.residency import ResidencyPolicy, SlotState


def describe_offload(
    kind: str,
    options: OffloadOptions,
    policy: ResidencyPolicy,
    counts: Counts,
    ledger: CostLedger,
    heat: HeatKeeper,
    crew: CrewStats | None,
    vram_bytes: int = 0,
) -> OffloadReport:
    """Give a snapshot. crew: the CPU workers', None without any."""
    return OffloadReport(
        kind=kind,
        mode=options.mode,
        num_slots=policy.num_slots,
        num_resident=int((policy.slot_states() == SlotState.RESIDENT).sum()),
        num_lent=policy.num_slots - policy.capacity,
        hit_share=counts.hit_share,
        counts=counts.frozen(),
        costs=ledger.report(policy.geometry.expert_bytes),
        crew_expert_ms=0.0 if crew is None else crew.ms_per_expert,
        crew_threads=0 if crew is None else options.crew_threads,
        vram_bytes=vram_bytes,
        heat=heat.report(),
    )
