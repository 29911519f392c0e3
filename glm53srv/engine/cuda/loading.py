"""From a checkpoint to a model whose experts stay in host memory, and to the cache that VRAM has room for.

    arena filled and registered -> model loaded around it -> small shapes run, reading at home ->
    free VRAM measured -> slots planned and allocated

What a step needs beside the weights (scratch, Triton's kernels, cuBLAS's workspace) exists by the time that
memory is measured, since a plan made before it would be too large by an amount that nobody knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm53srv.engine.cuda.model import PAGE_TOKENS, CudaModel
from glm53srv.engine.cuda.moe import adopt_sparse_layers, tables_of
from glm53srv.engine.cuda.package import Package
from glm53srv.engine.cuda.weights import ArenaTensors
from glm53srv.errors import MachineError
from glm53srv.kernels import Clamp
from glm53srv.model.config import ModelConfig
from glm53srv.offload.cost import VRAM_EXPERT_MS, CostModel, CostOverrides, Mode, default_costs
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import CrewOptions
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload, GpuOffloadOptions, measure_copy_ms
from glm53srv.offload.device.gpu.registered import device_alias, host_tensor
from glm53srv.offload.device.layout import sparse_layers
from glm53srv.offload.elastic import LoanParams, max_chunk_tokens
from glm53srv.offload.residency import ResidencyParams
from glm53srv.offload.staging import STAGE_MIN_PICKS
from glm53srv.offload.vram_plan import GIB, VramOptions, plan_vram

logger = logging.getLogger(__name__)

PROBE_TOKENS = 1024
"""Chunk by which the activations' memory is measured: every expert is read over the link for it, once."""
ACTIVATION_MARGIN = 1.15
"""A longer chunk routes less evenly than its length says."""

Wrap = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a CUDA engine is built.

    cache_tokens: room of the paged cache over all sequences. max_chunk_tokens: a prefill chunk at most; less
    if the card cannot hold its activations. vram_bytes: what of the card may be used, None for all that is
    free. chunk_slots: slots lent together. stage_min_picks: None scales the default by a layer's experts.
    crew_threads, crew_cpus: of the CPU workers, in fast mode; 0 threads leaves them out. poisons: for tests.
    """

    mode: Mode = "fast"
    max_streams: int = 4
    cache_tokens: int = 131072
    max_chunk_tokens: int = 8192
    vram_bytes: int | None = None
    vram: VramOptions = field(default_factory=VramOptions)
    chunk_slots: int = 32
    costs: CostOverrides = field(default_factory=CostOverrides)
    residency: ResidencyParams = field(default_factory=ResidencyParams)
    crew_threads: int = 0
    crew_cpus: tuple[int, ...] | None = None
    deadline_ms: int = 1500
    stage_min_picks: int | None = None
    link_share: float = 0.25
    poisons: bool = False
    device: int = 0

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return -(-self.cache_tokens // PAGE_TOKENS)

    def min_picks(self, num_experts: int) -> int:
        """Give the threshold of staging for a layer of num_experts."""
        return self.stage_min_picks or -(-STAGE_MIN_PICKS * num_experts // 288)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the device with its experts at home. layers: its sparse layers, ours."""

    package: Package
    config: ModelConfig
    model: CudaModel
    layers: list[Any]
    arena: ExpertArena
    alias: torch.Tensor
    device: torch.device


@dataclass(frozen=True, slots=True)
class OpenedOffload:
    """The cache and what it means for a chunk. chunk_tokens: the longest whose activations fit."""

    offload: GpuOffload
    chunk_tokens: int


def limit_vram(options: CudaOptions) -> torch.device:
    """Choose the device and hold the process to its share. Raises MachineError if the card has less."""
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if options.vram_bytes is not None:
        if options.vram_bytes > total:
            raise MachineError(
                f"GLM53_VRAM_GB asks for {options.vram_bytes / GIB:.1f} GiB, the card has {total / GIB:.1f}"
            )
        torch.cuda.set_per_process_memory_fraction(options.vram_bytes / total, device)
    return device


def free_vram(device: torch.device, limit_bytes: int | None) -> int:
    """Give the bytes that may still be allocated: what is free on the card, within the limit."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free if limit_bytes is None else min(free, limit_bytes - (total - free)))


def load_model(
    package: Package,
    model_dir: Path,
    config: ModelConfig,
    arena: ExpertArena,
    options: CudaOptions,
    progress: Callable[[float], None],
    wrap: Wrap | None = None,
) -> LoadedModel:
    """Load everything but the routed experts' trellis. progress: the fraction done.

    wrap: gives a tensor collection in place of the one that Config opened, from it and the device; for models
    that are in no file. Raises MachineError when the card is too small for it.
    """
    device = torch.device("cuda", options.device)
    root = package.root
    stock_config: Any = root.Config.from_directory(str(model_dir))
    files = stock_config.stc if wrap is None else wrap(stock_config.stc, device)
    alias = device_alias(package.extension, arena.region, device)
    model: Any = root.Model.from_config(stock_config)
    layers = adopt_sparse_layers(model)
    if len(layers) != arena.geometry.num_layers:
        raise MachineError(
            f"the model has {len(layers)} sparse layers, the arena {arena.geometry.num_layers}"
        )
    counter = _Counter(progress, 9 * arena.geometry.num_keys)
    stock_config.stc = ArenaTensors(files, arena, alias, sparse_layers(config), counter)
    cache = root.Cache(
        model,
        max_num_tokens=options.num_pages * PAGE_TOKENS,
        layer_type=root.CacheLayer_fp16,
        max_batch_size=options.max_streams + 1,  # one spare, for warm-up beside running sequences
    )
    try:
        with torch.inference_mode():
            model.load(device=f"cuda:{options.device}", progressbar=False)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"the card has no room for the weights beside the experts and a cache of {options.cache_tokens} "
            f"tokens: lower -cs, or free the card ({str(error).splitlines()[0]})"
        ) from error
    return LoadedModel(
        package, config, CudaModel(model, cache, config.vocab_size), layers, arena, alias, device
    )


def open_offload(loaded: LoadedModel, options: CudaOptions) -> OpenedOffload:
    """Run small shapes, measure what is left of the card, and build the cache. Raises MachineError."""
    geometry = loaded.arena.geometry
    activation = _probe(loaded, options)
    loan = LoanParams(activation_bytes_per_token=activation)
    lane = _hire(loaded, options)
    free = free_vram(loaded.device, options.vram_bytes)
    plan = plan_vram(geometry, free, options.mode, options.vram, options.chunk_slots)
    copy_ms = measure_copy_ms(
        host_tensor(loaded.arena.region), loaded.arena.layout.record_bytes, loaded.device
    )
    torch.cuda.empty_cache()
    costs = _costs(lane, options, copy_ms)
    gpu = GpuOffloadOptions(
        mode=options.mode,
        plan=plan,
        loan=loan,
        costs=costs,
        copy_ms=copy_ms,
        stage_min_picks=options.min_picks(geometry.num_experts),
        residency=options.residency,
        link_share=options.link_share,
        poisons=options.poisons,
    )
    offload = GpuOffload(
        loaded.arena,
        loaded.alias,
        [tables_of(layer) for layer in loaded.layers],
        options.max_streams,
        gpu,
        lane,
    )
    for layer in loaded.layers:
        layer.offload = offload
    chunk = min(options.max_chunk_tokens, max_chunk_tokens(plan, geometry.expert_bytes, loan))
    chunk = max(PAGE_TOKENS, chunk // PAGE_TOKENS * PAGE_TOKENS)
    logger.info(
        "cuda slots=%d free_gib=%.2f activation_bytes_per_token=%d chunk_tokens=%d copy_ms=%.3f gb_s=%.1f "
        "costs=%s",
        plan.num_slots,
        free / GIB,
        activation,
        chunk,
        copy_ms,
        loaded.arena.layout.record_bytes / copy_ms / 1e6,
        costs,
    )
    return OpenedOffload(offload, min(chunk, options.max_chunk_tokens))


def _probe(loaded: LoadedModel, options: CudaOptions) -> int:
    """Run a chunk and decode steps of every width, experts at home; gives a chunk's bytes per token."""
    model, device = loaded.model, loaded.device
    tokens = min(PROBE_TOKENS, options.max_chunk_tokens, options.num_pages * PAGE_TOKENS - 8)
    pages = list(range(-(-(tokens + 8) // PAGE_TOKENS)))
    with torch.inference_mode():
        for _ in range(2):  # the first run compiles and allocates statics
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run_prompt(model, tokens, pages)
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        for width in range(1, options.max_streams + 1):
            if width * len(pages) <= options.num_pages:
                run_decode(model, width, 3)
    return max(1, int(peak * ACTIVATION_MARGIN) // tokens)


def run_prompt(model: CudaModel, num_tokens: int, pages: list[int]) -> None:
    """Prefill num_tokens of a sequence that nobody keeps, to its logits."""
    state = model.new_state()
    try:
        ids = [1 + index * 7 % 251 for index in range(num_tokens)]
        chunk = model.begin_chunk(ids, state, pages, 0, is_last=True)
        model.run_layers(chunk, 0, model.num_layers, wants_rows=True)
        model.head(chunk, model.last_hidden(chunk)[:, -1:])
    finally:
        state.free()


def run_decode(model: CudaModel, width: int, num_steps: int) -> None:
    """Decode some steps of `width` sequences that nobody keeps, each on a page of its own."""
    states = [model.new_state() for _ in range(width)]
    try:
        for step in range(num_steps):
            pages = [[row] for row in range(width)]
            model.to_host(model.decode([7 + row for row in range(width)], states, pages, [step] * width))
    finally:
        for state in states:
            state.free()


def _hire(loaded: LoadedModel, options: CudaOptions) -> CpuLane | None:
    if options.mode == "exact" or options.crew_threads < 1:
        return None
    crew = CrewOptions(
        options.crew_threads,
        options.crew_cpus,
        clamp=Clamp.ACTIVATION,
        limit=loaded.config.swiglu_limit,
        deadline_ms=options.deadline_ms,
    )
    return CpuLane(loaded.arena, options.max_streams, crew, loaded.package.extension)


def _costs(lane: CpuLane | None, options: CudaOptions, copy_ms: float) -> CostModel:
    """Measure what a miss costs on either lane; the user's values win."""
    if lane is None:
        guess = default_costs(max(1, options.crew_threads))
        fixed, each = guess.cpu_fixed_ms, guess.cpu_expert_ms
    else:
        fixed, each = lane.calibrate()
    # A kernel's reads of one expert in place go at the link's rate, as the copy engine's do.
    return options.costs.apply(CostModel(fixed, each, copy_ms, min(VRAM_EXPERT_MS, 0.1 * copy_ms)))


class _Counter:
    """Turns tensors fetched into progress."""

    def __init__(self, progress: Callable[[float], None], total: int) -> None:
        self._progress = progress
        self._total = max(1, total)
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if self._count % 2048 == 0:
            self._progress(min(1.0, self._count / self._total))
