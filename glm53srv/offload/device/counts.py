"""The running counts of an offload."""

from __future__ import annotations

from dataclasses import dataclass, fields

from glm53srv.offload.report import OffloadCounts


@dataclass(slots=True)
class Counts:
    """OffloadCounts in the making. Owned by the engine thread."""

    num_steps: int = 0
    num_vram: int = 0
    num_link: int = 0
    num_cpu: int = 0
    num_copies: int = 0
    num_staged: int = 0
    num_loans: int = 0
    num_picks: int = 0
    num_hit_picks: int = 0
    num_kept: int = 0

    @property
    def hit_share(self) -> float | None:
        """Distinct experts that a slot served, of all that decode steps picked; None before the first."""
        total = self.num_vram + self.num_link + self.num_cpu
        return self.num_vram / total if total else None

    def frozen(self) -> OffloadCounts:
        """Give the values so far."""
        return OffloadCounts(*(getattr(self, field.name) for field in fields(self)))
