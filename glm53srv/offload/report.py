"""What an offload tells about itself in /stats: plain values, one frozen snapshot after each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm53srv.offload.calibrate import Source
from glm53srv.offload.cost import CostModel


@dataclass(frozen=True, slots=True)
class OffloadCounts:
    """What happened since the start. Distinct experts per layer and lane; copies in experts.

    num_split: of those of the link, experts that the CPU computed a part of.
    num_copies: admissions by the copy engine; num_kept: those of experts that took an offer. num_picks,
    num_hit_picks: all picks of decode steps, and those that a slot served. num_guessed: experts that were
    fetched ahead of their layer; num_guessed_right: those of them that it picked, also in num_link.
    gpu_lane_ms: of all layers of decode steps, from the plan to the GPU's last expert; cpu_wait_ms: what the
    GPU then waited for the CPU's part, in num_cpu_last layers. These three are 0 without CPU workers or
    without a GPU. num_prompt_cpu: experts of short prompts that CPU workers computed, summed over layers, in
    prompt_cpu_ms; prompt_device_ms and prompt_wait_ms: what the host meanwhile waited for the device and for
    the sums.
    """

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
    num_guessed: int = 0
    num_guessed_right: int = 0
    gpu_lane_ms: float = 0.0
    cpu_wait_ms: float = 0.0
    num_cpu_last: int = 0
    num_split: int = 0
    num_prompt_cpu: int = 0
    prompt_cpu_ms: float = 0.0
    prompt_device_ms: float = 0.0
    prompt_wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CostReport:
    """now, at_start: milliseconds. sources: where each start value comes from. Rates in 10^9 bytes a second.

    num_tables: split tables made so far, one at start and one for each drift.
    """

    now: CostModel
    at_start: CostModel
    sources: dict[str, Source]
    copy_ms: float
    link_gb_s: float | None
    cpu_gb_s: float | None
    copy_gb_s: float | None
    num_samples: int
    elapsed_s: float
    num_tables: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeatReport:
    """path: None if heat is not kept. is_warm: this run began with an earlier one's."""

    path: str | None = None
    is_warm: bool = False
    num_saves: int = 0


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """The offload as of the last step. hit_share: distinct experts served by a slot, of all; None before any.

    num_lent: slots whose memory a prefill or the KV cache has. crew_expert_ms: mean over the CPU workers'
    jobs. vram_bytes: memory of the GPU that torch held after its last change, 0 without one.
    """

    kind: str
    mode: str
    num_slots: int
    num_resident: int
    num_lent: int
    hit_share: float | None
    counts: OffloadCounts
    costs: CostReport
    crew_expert_ms: float
    crew_threads: int
    vram_bytes: int = 0
    heat: HeatReport = field(default_factory=HeatReport)
