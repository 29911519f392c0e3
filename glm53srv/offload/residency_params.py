"""The knobs of residency.py."""

from __future__ import annotations

from dataclasses import dataclass

from glm53srv.offload.offers import RING_SLOTS


@dataclass(frozen=True, slots=True)
class ResidencyParams:
    """Knobs of the policy.

    touch_window_steps: a miss is admitted if its expert was also picked in one of this many earlier steps; 0
    admits at first touch. heat_keep: what a decode step leaves of an expert's heat; 0.985 forgets half in 46
    steps. victim_window: how many slots per victim CLOCK offers, of which the coldest goes; 1 is plain CLOCK.
    min_heat_gain: a miss replaces a victim only if it is hotter by this much, in picks per step. A copy costs
    about as much link time as it saves in 1 / 0.02 steps; below -1 switches the guard off. max_in_flight:
    copies decided and not yet landed. num_offers: slots that steps may take for experts of the link, at most
    a sixteenth of the pool, since an offered slot lies idle; 0 admits by copies alone. offer_heat_gain: an
    expert takes one only if it is hotter by this much than the coldest that stays.
    """

    touch_window_steps: int = 8
    heat_keep: float = 0.985
    victim_window: int = 8
    min_heat_gain: float = 0.02
    max_in_flight: int = 64
    num_offers: int = 0
    offer_heat_gain: float = 0.01

    def __post_init__(self) -> None:
        """Check every range. Raises ValueError."""
        if self.touch_window_steps < 0 or self.victim_window < 1 or self.max_in_flight < 1:
            raise ValueError(f"impossible residency parameters: {self}")
        if not 0.0 < self.heat_keep < 1.0:
            raise ValueError("heat_keep must lie between 0 and 1")
        if not 0 <= self.num_offers <= RING_SLOTS:
            raise ValueError(f"num_offers must lie between 0 and {RING_SLOTS}")
