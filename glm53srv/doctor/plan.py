"""`glm53srv doctor --plan`: will it fit, and what is each gigabyte for, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm53srv.config import Config
from glm53srv.doctor.findings import Finding, fatal, ok
from glm53srv.doctor.model import OpenedModel, cpu_plan, largest_cpu_cache, open_model
from glm53srv.engine.factory import CPU_CHUNK_TOKENS
from glm53srv.errors import CheckpointError, ConfigError, MachineError
from glm53srv.flags import take_flags
from glm53srv.machine import GIB
from glm53srv.model.config import MlpKind, ModelConfig
from glm53srv.model.published import PUBLISHED
from glm53srv.model.state import PAGE_TOKENS
from glm53srv.model.weight_sizes import WeightSizes, checkpoint_sizes, published_sizes
from glm53srv.offload.cost import Mode
from glm53srv.offload.server_plan import (
    Basis,
    Demand,
    PlanLine,
    Room,
    largest_cache_tokens,
    plan_server,
)
from glm53srv.offload.vram_plan import VramOptions
from glm53srv.probe import Probe

SCHEMA = 1
"""Version of the JSON: a field may be added under the same number, none is taken away or changed."""

GPU_CHUNK_TOKENS = 8192
"""Prefill chunk with a GPU where -chunk_size does not say: the staged copy of all experts is then hidden
behind the computation (0xSero/glm53-flash-offload: 28 ms of stall in the 8.25 s of such a chunk)."""

FLAGS = {"--vram": "the card's memory in GiB", "--ram": "the host's memory in GiB"}


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """A machine that is pretended, in GiB; None: the one this runs on."""

    vram_gib: float | None = None
    ram_gib: float | None = None

    @classmethod
    def take(cls, argv: Sequence[str]) -> tuple[PlanFlags, list[str]]:
        """Take this command's flags off; gives what is left. Raises ConfigError."""
        rest, flags = take_flags(argv, FLAGS)
        return cls(_gib("--vram", flags.get("--vram")), _gib("--ram", flags.get("--ram"))), rest

    @property
    def is_given(self) -> bool:
        """Whether any of them was given."""
        return self.vram_gib is not None or self.ram_gib is not None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan to be shown. engine: cpu or cuda. vram is empty without a GPU. verdict: one line.

    slots: experts in VRAM while little of the cache is filled; page_slots: of those, what a full one takes.
    """

    engine: str
    model: str
    mode: str
    cache_tokens: int
    max_streams: int
    chunk_tokens: int
    vram: tuple[PlanLine, ...]
    ram: tuple[PlanLine, ...]
    slots: int | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    largest_cache_tokens: int | None
    verdict: str
    page_slots: int | None = None

    @property
    def exit_code(self) -> int:
        """0 if it fits, else that of the error `serve` would raise."""
        return MachineError.exit_code if self.problems else 0

    def text(self) -> str:
        """Lay it out for a terminal."""
        what = "one GPU" if self.vram else "the CPU engine"
        lines = [
            f"plan for {what}: mode {self.mode}, -cs {self.cache_tokens}, {self.max_streams} streams, "
            f"-chunk_size {self.chunk_tokens}",
            f"model: {self.model}",
        ]
        for title, part in (("VRAM", self.vram), ("RAM", self.ram)):
            if part:
                lines += ["", f"{title}, GiB", *(_line_text(line) for line in part)]
        lines += ["", *(f"note: {note}" for note in self.notes), *self.problems, self.verdict]
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Give the same as a JSON object; bytes are integers."""
        return {
            "schema": SCHEMA,
            "fits": not self.problems,
            "exit_code": self.exit_code,
            "engine": self.engine,
            "model": self.model,
            "mode": self.mode,
            "cache_tokens": self.cache_tokens,
            "max_streams": self.max_streams,
            "chunk_tokens": self.chunk_tokens,
            "vram": [_line_json(line) for line in self.vram],
            "ram": [_line_json(line) for line in self.ram],
            "slots": self.slots,
            "page_slots": self.page_slots,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "largest_cache_tokens": self.largest_cache_tokens,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model that is planned for. weight_bytes: all tensors that are read."""

    text: str
    config: ModelConfig
    weight_bytes: int
    sizes: WeightSizes


def make_plan(config: Config, probe: Probe, flags: PlanFlags) -> PlanReport:
    """Plan for the GPU that was pretended or is there, else for the CPU engine. Raises CheckpointError."""
    subject = _subject(config)
    gpus = probe.gpus().gpus if flags.vram_gib is None else ()
    if flags.vram_gib is None and (not gpus or config.engine.engine == "cpu"):
        return _plan_cpu(config, probe, flags, subject)
    return _plan_gpu(config, _room(probe, flags), subject)


def check_gpu_memory(config: Config, probe: Probe, opened: OpenedModel) -> Finding:
    """Compare what a server with a GPU takes with what is free now."""
    plan = _plan_gpu(config, _room(probe, PlanFlags()), _subject_of(config, opened))
    if plan.problems:
        text, _, remedy = plan.verdict.partition(": ")
        return fatal("gpu memory", MachineError(f"{text}: {', '.join(plan.problems)}"), remedy)
    return ok("gpu memory", f"{plan.slots} experts in VRAM; {plan.verdict}")


def _subject(config: Config) -> _Subject:
    if "model" not in config.sources:
        sizes = published_sizes()
        experts = PUBLISHED.mlp_kinds.count(MlpKind.SPARSE) * PUBLISHED.moe.num_experts * sizes.expert
        text = (
            "built-in numbers of GLM-5.3-Flash at 3.05 bits per weight; --model DIR takes a checkpoint's own"
        )
        total = experts + sizes.expert_scales + sizes.embedding + sizes.other
        return _Subject(text, PUBLISHED, total, sizes)
    try:
        opened = open_model(config.engine)
    except CheckpointError as error:
        hint = "or leave --model and GLM53_MODEL_DIR away to plan for the published model"
        raise CheckpointError(f"{error}, {hint}") from error
    return _subject_of(config, opened)


def _subject_of(config: Config, opened: OpenedModel) -> _Subject:
    sizes = checkpoint_sizes(opened.config, opened.checkpoint)
    return _Subject(str(config.engine.model_dir), opened.config, opened.weight_bytes, sizes)


def _room(probe: Probe, flags: PlanFlags) -> Room:
    """Give what there is; a pretended machine is empty, the real one counts by what is free now."""
    facts = probe.facts()
    ram = facts.usable_bytes if flags.ram_gib is None else int(flags.ram_gib * GIB)
    is_usable = flags.ram_gib is None
    if flags.vram_gib is not None:
        return Room(int(flags.vram_gib * GIB), ram, is_ram_usable=is_usable)
    gpu = probe.gpus().gpus[0]
    if gpu.free_bytes is None:
        return Room(gpu.total_bytes or 0, ram, is_ram_usable=is_usable)
    return Room(gpu.free_bytes, ram, is_vram_free=True, is_ram_usable=is_usable)


def _plan_gpu(config: Config, room: Room, subject: _Subject) -> PlanReport:
    engine, offload = config.engine, config.engine.offload
    mode: Mode = "exact" if engine.mode == "exact" else "fast"
    demand = Demand(
        mode,
        engine.cache_tokens,
        engine.max_streams,
        engine.chunk_tokens or GPU_CHUNK_TOKENS,
        VramOptions(
            offload.reserve_gib,
            offload.stage_gib,
            offload.elastic_gib,
            offload.max_slots,
            offload.landing,
            offload.ahead,
        ),
    )
    plan = plan_server(subject.config, subject.sizes, demand, room)
    num_experts = subject.config.moe.num_experts

    def slots_fit(cache_tokens: int, least_stage_slots: int = 0) -> bool:
        """Whether VRAM suffices; RAM does not depend on the cache."""
        slots = plan_server(
            subject.config, subject.sizes, replace(demand, cache_tokens=cache_tokens), room
        ).slots
        return slots is not None and slots.stage_slots >= least_stage_slots

    most_pages = engine.max_streams * subject.config.max_context_tokens // PAGE_TOKENS
    largest = largest_cache_tokens(slots_fit, most_pages)
    staged = largest_cache_tokens(lambda tokens: slots_fit(tokens, num_experts), most_pages)
    notes = list(plan.notes)
    if staged is not None and staged != largest:
        notes.append(f"up to -cs {staged} a prefill can stage whole layers")
    notes.append("lines marked published or assumed were not measured with this server")
    return PlanReport(
        engine="cuda",
        model=subject.text,
        mode=mode,
        cache_tokens=demand.num_pages * PAGE_TOKENS,
        max_streams=demand.max_streams,
        chunk_tokens=demand.chunk_tokens,
        vram=plan.vram,
        ram=plan.ram,
        slots=None if plan.slots is None else plan.slots.num_slots,
        problems=plan.problems,
        notes=tuple(notes),
        largest_cache_tokens=largest,
        verdict=_verdict(
            plan.problems, largest, is_cache_at_fault=plan.slots is None, ram_short=plan.ram_short_bytes
        ),
        page_slots=None if plan.slots is None else plan.slots.page_slots,
    )


def _plan_cpu(config: Config, probe: Probe, flags: PlanFlags, subject: _Subject) -> PlanReport:
    engine, facts = config.engine, probe.facts()
    room = facts.usable_bytes if flags.ram_gib is None else int(flags.ram_gib * GIB)
    plan = cpu_plan(engine, subject.config, subject.weight_bytes)
    computed = Basis.COMPUTED
    num_pages = -(-engine.cache_tokens // PAGE_TOKENS)
    whence = (Basis.MEASURED, "usable now") if flags.ram_gib is None else (Basis.GIVEN, "as asked for")
    lines = (
        PlanLine("host memory", room, *whence),
        PlanLine("weights", plan.mapped_bytes, computed, "read in place from the files, as page cache"),
        PlanLine(
            "float32 copies", plan.converted_bytes, computed, "key and value projections of the MLA layers"
        ),
        PlanLine(
            "cache", plan.cache_bytes, computed, f"{num_pages} pages of {PAGE_TOKENS} tokens (-cs), float32"
        ),
        PlanLine("states", plan.state_bytes, computed, f"{engine.max_streams} streams, float32"),
        PlanLine("activations", plan.activation_bytes, Basis.ASSUMED, "estimate from above for one chunk"),
    )
    largest = largest_cpu_cache(engine, subject.config, subject.weight_bytes, room)
    problems: tuple[str, ...] = ()
    if plan.total_bytes > room:
        problems = (f"RAM: {plan.total_bytes / GIB:.1f} GiB needed, {room / GIB:.1f} there",)
    return PlanReport(
        engine="cpu",
        model=subject.text,
        mode=engine.mode,
        cache_tokens=num_pages * PAGE_TOKENS,
        max_streams=engine.max_streams,
        chunk_tokens=engine.chunk_tokens or CPU_CHUNK_TOKENS,
        vram=(),
        ram=lines,
        slots=None,
        problems=problems,
        notes=("no GPU was found or pretended; --vram 24 plans for one",),
        largest_cache_tokens=largest,
        verdict=_verdict(problems, largest, is_cache_at_fault=bool(problems), ram_short=0),
    )


def _verdict(problems: Sequence[str], largest: int | None, *, is_cache_at_fault: bool, ram_short: int) -> str:
    if not problems:
        return f"fits; the largest cache that does is -cs {largest}"
    advice = []
    if is_cache_at_fault:
        smaller = "use fewer streams, a smaller checkpoint, or a larger machine"
        advice.append(f"use -cs {largest}" if largest is not None else smaller)
    if ram_short:
        advice.append(f"add {math.ceil(ram_short / GIB)} GiB of RAM or free it")
    hopeless = " with any -cs" if is_cache_at_fault and largest is None else ""
    return f"does not fit{hopeless}: {', and '.join(advice)}"


def _line_text(line: PlanLine) -> str:
    name = f"{'  ' if line.is_part else ''}{line.name}"
    return f"{line.num_bytes / GIB:9.2f}  {name:30s} {line.basis.value:9s}  {line.reason}"


def _line_json(line: PlanLine) -> dict[str, object]:
    return {
        "name": line.name,
        "bytes": line.num_bytes,
        "basis": line.basis.value,
        "reason": line.reason,
        "is_part": line.is_part,
    }


def _gib(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(f"{flag} is {text!r}, must be a number of GiB above 0; for a 24 GB card write 24")
    return number
