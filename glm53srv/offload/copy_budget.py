"""How many admissions a step may start: a share of the link, handed out by the time that passed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyBudgetParams:
    """link_share: part of the link's time that admissions may take. copy_ms: one expert by the copy engine.

    max_burst: experts that an idle time may save up for.
    """

    link_share: float = 0.25
    copy_ms: float = 0.378  # 9,437,184 B at 25 GB/s, PCIe 4.0 x16 (0xSero/glm53-flash-offload)
    max_burst: int = 32

    def __post_init__(self) -> None:
        """Check every range. Raises ValueError."""
        if not 0.0 <= self.link_share <= 1.0 or self.copy_ms <= 0.0 or self.max_burst < 1:
            raise ValueError(f"impossible copy budget: {self}")


class CopyBudget:
    """A token bucket in experts. Owned by the engine thread, asked once per step."""

    def __init__(self, params: CopyBudgetParams | None = None) -> None:
        self.params = params or CopyBudgetParams()
        self._saved = 0.0

    def grant(self, step_ms: float) -> int:
        """Add the share of step_ms and return the whole experts available now."""
        earned = max(0.0, step_ms) * self.params.link_share / self.params.copy_ms
        self._saved = min(self._saved + earned, float(self.params.max_burst))
        return int(self._saved)

    def spend(self, num_admissions: int) -> None:
        """Take off what was used. Raises ValueError for more than was granted."""
        if not 0 <= num_admissions <= int(self._saved):
            raise ValueError(f"spent {num_admissions} of {self._saved:.2f} granted admissions")
        self._saved -= num_admissions
