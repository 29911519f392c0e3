"""How free VRAM is divided between the expert cache, staging and the reserve. Every number can be explained.

    |<------------ free, measured after weights, first pages of the KV cache and scratch ------------->|
    | slots that always serve | elastic slots: lent to a prefill    | page  | rest      | landing, | reserve |
    |                         | staging A | staging B | activations | slots | < 1 chunk | ahead    |         |

Slots come in chunks, because lending hands whole allocations back. Page slots serve until the KV cache fills:
its pages take their memory chunk by chunk. GB options are GiB: a staging buffer of 2.6 then holds all 288
experts of a layer (2.53 GiB).
"""

from __future__ import annotations

from dataclasses import dataclass

from glm53srv.errors import MachineError
from glm53srv.offload.cost import Mode
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.look_ahead import NUM_AHEAD, num_buffers_ahead

GIB = 2**30
RESERVE_GIB = {"fast": 1.25, "exact": 1.0}
"""What stays free of the card, for graphs among others; 1.0 failed under batched decode where 1.5 held
(0xSero/glm53-flash-offload). Of an H200 held to 24 GiB, fast mode left 1.1 GiB unused with 1.5 in twenty
minutes of mixed load with prompts to 32k, 0.37 with 1.0 in 2.5 and 0.64 with 1.25 in 3.4 (bench/results/
2026-11-30-h200-serving.md, 2026-11-30-h200-pages.md, 2026-12-01-h200.md)."""
CHUNK_SLOTS = 16
"""Slots of one allocation, which are lent together: 151 MB of GLM-5.3-Flash's experts. What is left over, of
the card and of the KV cache, is less than one."""


@dataclass(frozen=True, slots=True)
class VramOptions:
    """What the user may set, in GiB (GLM53_EC_RESERVE_GB, GLM53_EC_STAGE_GB, GLM53_EC_ELASTIC_GB,
    GLM53_EC_MAX_SLOTS, GLM53_EC_LANDING, GLM53_EC_AHEAD).

    reserve_gib None means RESERVE_GIB. landing: buffers for experts that come over the link in a decode
    step. ahead: experts that are fetched before their layer is planned, in a step of one row; with one more,
    for steps of several, each takes two buffers (look_ahead.py).
    """

    reserve_gib: float | None = None
    stage_gib: float = 2.6
    elastic_gib: float = 12.0
    max_slots: int | None = None
    landing: int = 16
    ahead: int = NUM_AHEAD

    @property
    def num_buffers(self) -> int:
        """Buffers of an expert each, beside the slots."""
        return self.landing + 2 * num_buffers_ahead(self.ahead)

    def reserve_bytes(self, mode: Mode) -> int:
        """Bytes that stay free."""
        return int((RESERVE_GIB[mode] if self.reserve_gib is None else self.reserve_gib) * GIB)


@dataclass(frozen=True, slots=True)
class VramLine:
    """One line of the explanation; bytes of a limit are given even where it does not bind."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class VramPlan:
    """Sizes in slots. stage_slots: of one of the two buffers. activation_slots: what else may be lent.
    landing: buffers of an expert each, no slots. ahead: see VramOptions. page_slots: of num_slots, those
    whose memory is the KV cache's once it fills.

    Invariant: 2 * stage_slots + activation_slots <= elastic_slots < num_slots - page_slots, all in whole
    chunks but stage_slots.
    """

    num_slots: int
    chunk_slots: int
    elastic_slots: int
    stage_slots: int
    activation_slots: int
    lines: tuple[VramLine, ...]
    landing: int = 0
    ahead: int = 0
    page_slots: int = 0


def plan_vram(
    geometry: ExpertGeometry,
    free_bytes: int,
    mode: Mode,
    options: VramOptions | None = None,
    chunk_slots: int = CHUNK_SLOTS,
    page_bytes: int = 0,
) -> VramPlan:
    """Divide free_bytes. Raises MachineError when not even one chunk of slots fits.

    free_bytes: measured once everything but the expert cache is allocated. chunk_slots: slots of one
    allocation; fewer where no more may be taken. page_bytes: of free_bytes, what the KV cache will take when
    it fills; what of it is no whole chunk is not for slots.
    """
    options = options or VramOptions()
    size = geometry.expert_bytes
    reserve = options.reserve_bytes(mode)
    limit = geometry.num_keys if options.max_slots is None else min(options.max_slots, geometry.num_keys)
    chunk_slots = max(1, min(chunk_slots, limit))
    chunk_bytes = chunk_slots * size
    landing_bytes = options.num_buffers * size
    by_memory = max(0, free_bytes - page_bytes - reserve - landing_bytes) // size
    chunks = min(by_memory, limit) // chunk_slots
    if chunks < 1:
        there = max(0, free_bytes - page_bytes) / GIB
        raise MachineError(
            f"no room for the expert cache: {there:.2f} GiB of VRAM free, {reserve / GIB:.2f} "
            f"reserved, {landing_bytes / GIB:.2f} for landing, {chunk_bytes / GIB:.2f} needed for "
            f"{chunk_slots} experts; lower --cache-tokens, GLM53_EC_RESERVE_GB or GLM53_EC_LANDING, or raise "
            "GLM53_EC_MAX_SLOTS"
        )
    page_slots = min(page_bytes // chunk_bytes, limit // chunk_slots - chunks) * chunk_slots
    num_slots = chunks * chunk_slots + page_slots
    elastic_chunks = min(int(options.elastic_gib * GIB) // chunk_bytes, chunks - 1)
    elastic_slots = elastic_chunks * chunk_slots
    stage_slots = min(int(options.stage_gib * GIB) // size, geometry.num_experts, elastic_slots // 2)
    activation_slots = (elastic_slots - 2 * stage_slots) // chunk_slots * chunk_slots
    why_slots = (
        f"{num_slots} slots of {size} B in {num_slots // chunk_slots} chunks; "
        + (
            "memory"
            if limit - num_slots >= chunk_slots
            else "all experts fit"
            if limit == geometry.num_keys
            else "the limit"
        )
        + " decides"
    )
    pages_left = page_bytes - page_slots * size
    left = free_bytes - reserve - landing_bytes - num_slots * size - pages_left
    lines = (
        VramLine("free", free_bytes, "measured after weights, first pages of the KV cache and scratch"),
        VramLine(
            "reserve", reserve, _given(options.reserve_gib is None, f"default of {mode} mode", "RESERVE")
        ),
        VramLine(
            "landing",
            landing_bytes,
            f"{options.landing} experts on their way in a decode step, twice "
            f"{num_buffers_ahead(options.ahead)} ahead of it",
        ),
        VramLine("expert cache", num_slots * size, why_slots),
        VramLine("KV cache", pages_left, "pages that have memory from the start, beside the first"),
        VramLine("left over", left, f"less than a chunk of {chunk_slots} slots, or beyond the limit"),
        VramLine(
            "of the cache: elastic",
            elastic_slots * size,
            f"{elastic_slots} slots that a prefill may borrow; at most {options.elastic_gib} GiB, "
            "one chunk stays",
        ),
        VramLine(
            "of the elastic: staging",
            2 * stage_slots * size,
            f"two buffers of {stage_slots} experts; at most {options.stage_gib} GiB each, a layer has "
            f"{geometry.num_experts}",
        ),
        VramLine(
            "of the elastic: activations",
            activation_slots * size,
            "the other whole chunks, as a prefill needs",
        ),
        VramLine(
            "of the cache: pages",
            page_slots * size,
            f"{page_slots} slots whose memory the KV cache takes as it fills",
        ),
    )
    return VramPlan(
        num_slots,
        chunk_slots,
        elastic_slots,
        stage_slots,
        activation_slots,
        lines,
        options.landing,
        options.ahead,
        page_slots,
    )


def explain(plan: VramPlan) -> list[str]:
    """Return the plan as lines of text for `doctor --plan`."""
    return [f"{line.name:28s} {line.num_bytes / GIB:7.2f} GiB  {line.reason}" for line in plan.lines]


def _given(is_default: bool, default: str, name: str) -> str:
    return default if is_default else f"GLM53_EC_{name}_GB"
