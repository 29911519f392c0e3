"""What a server with one GPU needs of VRAM and RAM, before it takes any: arithmetic, every line explained.

    VRAM   driver | weights | expert scales | cache | states | context and scratch | what vram_plan.py divides
    RAM    experts | expert scales | embedding | process | left for the system

Sizes of caches and states are those of exllamav3 1.5.1, whose classes hold them (cache/mla.py and
modules/gated_delta_net.py): latents, indexer keys and pooled keys in float16, the convolution's columns in
bfloat16, the recurrent matrices in float32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from glm53srv.errors import MachineError
from glm53srv.model.config import MlpKind, ModelConfig
from glm53srv.model.state import PAGE_TOKENS
from glm53srv.model.weight_sizes import WeightSizes
from glm53srv.offload.cost import Mode
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.vram_plan import CHUNK_SLOTS, GIB, VramOptions, VramPlan, plan_vram

MIB = 2**20
_F16 = 2
_BF16 = 2
_F32 = 4

DRIVER_BYTES = 310 * MIB
"""What the driver keeps of a 24 GB card: 24,576 MiB less 22,730 in use less the 1.5 GiB kept free
(0xSero/glm53-flash-offload, results/G067, RTX 3090)."""

SCRATCH_BYTES = int(1.87 * GIB)
"""CUDA context, kernels, their scratch, graphs and what the allocator cannot use: fast mode left 13.50 GiB of
an H200 held to 24 GiB beside the lines above for 131,072 tokens and four streams (30 November 2026; 13.81 of
the day before without graphs and look-ahead make 1.56, and so do the 22,730 MiB in use of G067)."""

PROCESS_BYTES = int(3.2 * GIB)
"""Python, torch, CUDA's host side and the objects of 36,288 linears: the 119.3 GB that a server with one copy
of the experts took (same source, exact mode), less experts, scales and embedding."""

SYSTEM_BYTES = 2 * GIB
"""Left to the operating system and other programs; an assumption."""


class Basis(enum.Enum):
    """Where a number comes from."""

    COMPUTED = "computed"
    GIVEN = "given"
    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One explained number. A part of another line is indented and not added up."""

    name: str
    num_bytes: int
    basis: Basis
    reason: str
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served. cache_tokens is rounded up to whole pages of 256."""

    mode: Mode
    cache_tokens: int
    max_streams: int
    chunk_tokens: int
    vram: VramOptions = field(default_factory=VramOptions)

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return -(-self.cache_tokens // PAGE_TOKENS)

    @property
    def first_pages(self) -> int:
        """Pages with memory from the start, for the longest chunk; the others get theirs as they fill."""
        return min(self.num_pages, -(-(self.chunk_tokens + 8) // PAGE_TOKENS))


@dataclass(frozen=True, slots=True)
class Room:
    """What the machine has, in bytes.

    vram_bytes: free now if is_vram_free, else what the card is sold with. ram_bytes: usable now if
    is_ram_usable, else what is built in.
    """

    vram_bytes: int
    ram_bytes: int
    is_vram_free: bool = False
    is_ram_usable: bool = False


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The result. slots: how VRAM for experts is divided, None if there is not even room for a chunk of them.

    problems: one line each for what does not fit. notes: what fits but costs speed. ram_short_bytes: 0 if RAM
    suffices.
    """

    vram: tuple[PlanLine, ...]
    ram: tuple[PlanLine, ...]
    slots: VramPlan | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    ram_short_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the server could start."""
        return not self.problems


def geometry_of(model: ModelConfig, weights: WeightSizes) -> ExpertGeometry:
    """Give the shape of the expert store."""
    num_layers = model.mlp_kinds.count(MlpKind.SPARSE)
    return ExpertGeometry(num_layers, model.moe.num_experts, model.moe.top_k, weights.expert)


def latent_bytes_per_token(model: ModelConfig) -> int:
    """Give what latent attention caches of one token over all its layers."""
    return _F16 * len(model.mla_layers) * model.mla.kv_lora_rank


def indexer_bytes_per_page(model: ModelConfig) -> int:
    """Give what the indexer caches of 256 tokens: key and score of each, and one pooled key per kpool."""
    indexer = model.indexer
    values = PAGE_TOKENS * 2 * indexer.head_dim + PAGE_TOKENS // indexer.kpool * indexer.head_dim
    return _F16 * len(model.mla_layers) * values


def late_page_bytes(model: ModelConfig, demand: Demand) -> int:
    """Give what pages of the cache take that have no memory before they hold tokens: those beyond a chunk."""
    per_page = PAGE_TOKENS * latent_bytes_per_token(model) + indexer_bytes_per_page(model)
    return (demand.num_pages - demand.first_pages) * per_page


def state_bytes_per_stream(model: ModelConfig) -> int:
    """Give the recurrent state of one sequence over all linear-attention layers."""
    kda = model.kda
    convolution = _BF16 * 3 * kda.width * kda.conv_kernel
    matrices = _F32 * kda.num_heads * kda.head_dim**2
    return len(model.kda_layers) * (convolution + matrices)


def prefill_bytes(model: ModelConfig, chunk_tokens: int) -> int:
    """Estimate the largest arrays of one prefill chunk; an assumption until it is measured here.

    Expert outputs float32 (chunk * top_k, hidden), the four float32 streams before and after a block, the
    linear-attention gates (exllamav3 1.6.5 names 2.5 GB per 16,384 rows as what 1.5.1 has too much), and
    320 MiB of weights and tiles.
    """
    per_token = _F32 * model.hidden_size * (model.moe.top_k + 2 * model.hc.num_streams)
    per_token += 2_500_000_000 // 16_384 * model.kda.width // 8192
    return chunk_tokens * per_token + 320 * MIB


def plan_server(model: ModelConfig, weights: WeightSizes, demand: Demand, room: Room) -> ServerPlan:
    """Compute the plan. Raises nothing: what does not fit is in `problems`."""
    vram = _fixed_vram(model, weights, demand, room)
    pages = late_page_bytes(model, demand)
    free = room.vram_bytes - sum(line.num_bytes for line in vram)
    geometry = geometry_of(model, weights)
    total = PlanLine("GPU memory", room.vram_bytes, *_whence(room.is_vram_free, "free on this GPU"))
    left = PlanLine("left for experts", max(free, 0), Basis.COMPUTED, "the first line less those below it")
    problems: list[str] = []
    notes: list[str] = []
    slots: VramPlan | None = None
    try:
        slots = plan_vram(geometry, free, demand.mode, demand.vram, page_bytes=pages)
    except MachineError:
        smallest = (CHUNK_SLOTS + demand.vram.num_buffers) * geometry.expert_bytes
        need = demand.vram.reserve_bytes(demand.mode) + smallest + pages
        problems.append(f"VRAM: {(need - free) / GIB:.2f} GiB short of the reserve and the smallest cache")
        lines: tuple[PlanLine, ...] = (total, *vram, left)
    else:
        lines = (total, *vram, left, *_slot_lines(slots, demand))
        notes += _slot_notes(slots, geometry, prefill_bytes(model, demand.chunk_tokens))
    ram = _ram(weights, geometry, room)
    needed = sum(line.num_bytes for line in ram)
    built_in = PlanLine("host memory", room.ram_bytes, *_whence(room.is_ram_usable, "usable on this machine"))
    if needed > room.ram_bytes:
        problems.append(
            f"RAM: {needed / GIB:.1f} GiB needed, {room.ram_bytes / GIB:.1f} there: all experts lie in RAM"
        )
    short = max(0, needed - room.ram_bytes)
    return ServerPlan(lines, (built_in, *ram), slots, tuple(problems), tuple(notes), short)


def largest_cache_tokens(fits: Callable[[int], bool], most_pages: int) -> int | None:
    """Give the largest cache, in whole pages, for which fits(cache_tokens) holds; None if not even one page.

    fits must not turn true again once it was false. most_pages: where the search ends.
    """
    if not fits(PAGE_TOKENS):
        return None
    low, high = 1, most_pages + 1  # fits(low), not known above; high is taken not to fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * PAGE_TOKENS) else (low, middle)
    return low * PAGE_TOKENS


def _fixed_vram(model: ModelConfig, weights: WeightSizes, demand: Demand, room: Room) -> list[PlanLine]:
    tokens, latent = demand.first_pages * PAGE_TOKENS, latent_bytes_per_token(model)
    whole = demand.num_pages * PAGE_TOKENS
    indexer, state = indexer_bytes_per_page(model), state_bytes_per_stream(model)
    computed = Basis.COMPUTED
    lines = [
        PlanLine("weights but experts", weights.other, computed, "tensors of the checkpoint, as stored"),
        PlanLine("expert scales", weights.expert_scales, computed, "suh and svh of all routed experts"),
        PlanLine(
            "cache: latents",
            tokens * latent,
            computed,
            f"{tokens} of {whole} tokens (-cs) from the start x {latent} B: {len(model.mla_layers)} layers x "
            f"{model.mla.kv_lora_rank} float16",
        ),
        PlanLine(
            "cache: indexer",
            demand.first_pages * indexer,
            computed,
            f"{demand.first_pages} of {demand.num_pages} pages x {indexer} B: keys, scores and pooled keys "
            "of 256 tokens",
        ),
        PlanLine(
            "recurrent states",
            demand.max_streams * state,
            computed,
            f"{demand.max_streams} streams x {state / MIB:.1f} MiB: {len(model.kda_layers)} layers",
        ),
        PlanLine(
            "context and scratch",
            SCRATCH_BYTES,
            Basis.PUBLISHED,
            "what fast mode held of an H200 beside the lines above; not measured on this machine",
        ),
    ]
    if not room.is_vram_free:
        why = "what the driver kept of a 24 GB card in a published run"
        lines.insert(0, PlanLine("driver", DRIVER_BYTES, Basis.PUBLISHED, why))
    return lines


def _slot_lines(slots: VramPlan, demand: Demand) -> list[PlanLine]:
    """Take over the lines of the division, without its first, which is the sum of ours."""
    lines = []
    for line in slots.lines[1:]:
        is_reserve = line.name == "reserve"
        basis = Basis.GIVEN if is_reserve and demand.vram.reserve_gib is not None else Basis.COMPUTED
        if is_reserve and demand.vram.reserve_gib is None:
            basis = Basis.PUBLISHED
        lines.append(PlanLine(line.name, line.num_bytes, basis, line.reason, line.name.startswith("of the")))
    return lines


def _slot_notes(slots: VramPlan, geometry: ExpertGeometry, needed: int) -> list[str]:
    notes = [
        f"the cache holds {slots.num_slots} of {geometry.num_keys} experts "
        f"({slots.num_slots / geometry.num_keys:.1%}), {slots.num_slots - slots.page_slots} of them once all "
        "tokens of -cs are there"
    ]
    if slots.stage_slots < geometry.num_experts:
        notes.append(
            f"a prefill stages only {slots.stage_slots} of a layer's {geometry.num_experts} experts at once: "
            "long prompts are read more slowly"
        )
    there = slots.activation_slots * geometry.expert_bytes + _line_bytes(slots, "left over")
    if needed > there:
        notes.append(
            f"a prefill chunk may need {needed / GIB:.1f} GiB, {there / GIB:.1f} are left beside the "
            "reserve; use a smaller -chunk_size if a long prompt runs out of memory"
        )
    return notes


def _line_bytes(slots: VramPlan, name: str) -> int:
    return next(line.num_bytes for line in slots.lines if line.name == name)


def _ram(weights: WeightSizes, geometry: ExpertGeometry, room: Room) -> list[PlanLine]:
    lines = [
        PlanLine(
            "routed experts",
            geometry.num_keys * geometry.expert_bytes,
            Basis.COMPUTED,
            f"{geometry.num_layers} layers x {geometry.num_experts} x {geometry.expert_bytes} B, pinned",
        ),
        PlanLine(
            "expert scales", weights.expert_scales, Basis.COMPUTED, "for the CPU's share of the experts"
        ),
        PlanLine("embedding", weights.embedding, Basis.COMPUTED, "looked up in host memory"),
        PlanLine(
            "process",
            PROCESS_BYTES,
            Basis.PUBLISHED,
            "what a published run took beside the lines above; not measured here",
        ),
    ]
    if not room.is_ram_usable:
        lines.append(PlanLine("system", SYSTEM_BYTES, Basis.ASSUMED, "operating system and other programs"))
    return lines


def _whence(is_measured: bool, text: str) -> tuple[Basis, str]:
    return (Basis.MEASURED, text) if is_measured else (Basis.GIVEN, "as asked for")
