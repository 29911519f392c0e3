"""How much of the cache a prefill borrows, and when it is given back.

    phase      event                                     next       slots
    FULL       begin, loan of n > 0                      CALLED     shrink by n
    FULL       begin, loan of 0                          FULL       -
    CALLED     poll, slots are lent                      LENT       -
    CALLED     poll, not yet                             CALLED     -
    CALLED     end                                       FULL       grow by all (an aborted prefill)
    LENT       begin, loan larger than what is lent      CALLED     shrink by the difference
    LENT       begin, loan not larger                    LENT       -
    LENT       end, more prefill is waiting              LENT       -
    LENT       end, none waiting                         FULL       grow by all

A loan between two chunks of waiting prompts is kept, since giving it back means re-warming a thousand
experts (10 GB, 0.4 s of the link) only to call them back. It is never reduced while a prefill runs. Pausing
between layers is no event: the loan stays with the chunk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from glm53srv.offload.vram_plan import VramPlan


class Phase(enum.Enum):
    """Where the elastic slots are; see the head of the file."""

    FULL = "full"
    CALLED = "called"
    LENT = "lent"


@dataclass(frozen=True, slots=True)
class Resize:
    """What residency has to do now: shrink or grow by so many slots; at most one is not 0."""

    shrink: int = 0
    grow: int = 0


class ElasticLoan:
    """Owns the phase and the size of the loan. Called by the engine thread around each prefill chunk."""

    def __init__(self, plan: VramPlan) -> None:
        self._plan = plan
        self.phase = Phase.FULL
        self.num_lent = 0

    def begin(self, num_slots: int) -> Resize:
        """Begin a chunk that needs num_slots. Raises ValueError for more than is elastic, or while called."""
        if not 0 <= num_slots <= self._plan.elastic_slots:
            raise ValueError(f"a loan of {num_slots} slots, {self._plan.elastic_slots} are elastic")
        if self.phase is Phase.CALLED:
            raise ValueError("a chunk began before the slots called for the last one were lent")
        missing = max(0, num_slots - self.num_lent)
        if missing:
            self.phase = Phase.CALLED
            self.num_lent += missing
        return Resize(shrink=missing)

    def poll(self, is_lent: bool) -> bool:
        """Return whether the chunk may use its loan; is_lent: ResidencyPolicy.is_lent."""
        if self.phase is Phase.CALLED and is_lent:
            self.phase = Phase.LENT
        return self.phase is not Phase.CALLED

    def end(self, is_more_waiting: bool) -> Resize:
        """The chunk is over or aborted; is_more_waiting: another chunk follows at once."""
        if self.phase is Phase.FULL or (self.phase is Phase.LENT and is_more_waiting):
            return Resize()
        grown, self.num_lent = self.num_lent, 0
        self.phase = Phase.FULL
        return Resize(grow=grown)


ACTIVATION_MARGIN = 1.1
"""Measured bytes per token times this are planned for: a longer chunk may route less evenly."""


@dataclass(frozen=True, slots=True)
class LoanParams:
    """activation_bytes_per_token: transients of a chunk, of which the reserve holds free_activation_bytes.

    The default is an estimate (a chunk of 8,192 tokens needs several GB; the fp32 scratch of the experts
    alone is 8 * 4096 * 4 B per token); the device layer replaces it with a measurement.
    """

    activation_bytes_per_token: int = 524_288
    free_activation_bytes: int = 512 * 2**20


def loan_slots(
    plan: VramPlan, expert_bytes: int, num_tokens: int, is_staged: bool, params: LoanParams | None = None
) -> int:
    """Return how many slots a chunk of num_tokens borrows: whole chunks of slots, 0 if it fits without.

    Staging takes both buffers; activations take what the reserve cannot hold. Never more than is elastic:
    then the chunk is too long for this card and the caller must cut it (see `max_chunk_tokens`).
    """
    params = params or LoanParams()
    beyond = num_tokens * params.activation_bytes_per_token - params.free_activation_bytes
    slots = max(0, -(-beyond // expert_bytes)) + (2 * plan.stage_slots if is_staged else 0)
    return min(-(-slots // plan.chunk_slots) * plan.chunk_slots, plan.elastic_slots)


def fit_loan(peaks: list[tuple[int, int]]) -> LoanParams:
    """Fit the memory of a chunk, a fixed part and one per token, to (tokens, bytes at most) of some chunks.

    One chunk alone is taken as if nothing were fixed.
    """
    (few, low), (many, high) = peaks[0], peaks[-1]
    per_token = (high - low) / (many - few) if many > few else high / max(1, many)
    per_token = max(1.0, per_token)
    fixed = max(0, int(low - few * per_token))
    return LoanParams(
        activation_bytes_per_token=int(per_token * ACTIVATION_MARGIN) + 1,
        free_activation_bytes=max(0, LoanParams().free_activation_bytes - fixed),
    )


def max_chunk_tokens(plan: VramPlan, expert_bytes: int, params: LoanParams | None = None) -> int:
    """Return the longest chunk whose activations fit beside both staging buffers."""
    params = params or LoanParams()
    room = plan.activation_slots * expert_bytes + params.free_activation_bytes
    return room // params.activation_bytes_per_token
