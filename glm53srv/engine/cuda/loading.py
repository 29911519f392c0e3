"""From a checkpoint to a model whose experts stay in host memory, and to the cache that VRAM has room for.

    arena filled and registered -> model loaded around it -> small shapes run, reading at home ->
    free VRAM measured -> slots planned and allocated, also where the KV cache will be once it fills

What a step needs beside the weights (scratch, Triton's kernels, cuBLAS's workspace) exists by the time that
memory is measured, since a plan made before it would be too large by an amount that nobody knows.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm53srv.engine.cuda.cache_pages import find_blocks, hold_pages, limit_torch
from glm53srv.engine.cuda.gates_beside import GatesBeside, make_two_streams
from glm53srv.engine.cuda.model import PAGE_TOKENS, CudaModel
from glm53srv.engine.cuda.moe import adopt_sparse_layers, router_of, tables_of
from glm53srv.engine.cuda.package import Package
from glm53srv.engine.cuda.weights import ArenaTensors
from glm53srv.errors import MachineError
from glm53srv.kernels import Clamp, Isa
from glm53srv.model.config import ModelConfig
from glm53srv.offload.calibrate import Calibration, assume, calibrate, describe
from glm53srv.offload.cost import Mode, default_costs
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.crew import CrewOptions
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.device_blocks import BlockSource
from glm53srv.offload.device.gpu.gpu_memory import GpuMemory
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.offload.device.gpu.gpu_probes import GpuProbes
from glm53srv.offload.device.gpu.launch import power_of_two
from glm53srv.offload.device.gpu.page_memory import PageMemory
from glm53srv.offload.device.gpu.page_room import PageRoom
from glm53srv.offload.device.gpu.registered import RegisteredMemory, device_alias
from glm53srv.offload.device.layout import sparse_layers
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.elastic import LoanParams, fit_loan, max_chunk_tokens
from glm53srv.offload.vram_plan import CHUNK_SLOTS, GIB, explain, plan_vram

logger = logging.getLogger(__name__)

PROBE_TOKENS = 1024
"""The shorter of the two chunks by which the activations' memory is measured. The other is the longest that
may come: a line through two short ones promised 8,192 tokens a place that they did not have."""
POLL_US = 100_000
"""How long idle CPU workers poll before they park. The host rings when it begins to enqueue a step, and the
device posts that step's first job when it gets there: behind the dense layers, or behind a step that still
runs. A worker that has parked meanwhile looks again only after 100 ms."""

Wrap = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a CUDA engine is built.

    cache_tokens: room of the paged cache over all sequences. max_chunk_tokens: a prefill chunk at most; less
    if the card cannot hold its activations. vram_bytes: what of the card may be used, None for all that is
    free. offload: mode, cache and CPU workers; 0 crew_threads leaves the workers out; its chunk_slots None
    stands for CHUNK_SLOTS. poisons: for tests, see GpuSlots. tuning_dir: see package.open_package. graphs:
    whether decode steps are captured, see graphs.py. whole_cache: the paged cache has all its memory from
    the start, for comparison.
    """

    offload: OffloadOptions = field(default_factory=OffloadOptions)
    max_streams: int = 4
    cache_tokens: int = 131072
    max_chunk_tokens: int = 8192
    vram_bytes: int | None = None
    poisons: bool = False
    device: int = 0
    tuning_dir: Path | None = None
    graphs: bool = True
    whole_cache: bool = False

    @property
    def mode(self) -> Mode:
        """Give the mode."""
        return self.offload.mode

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return -(-self.cache_tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the device with its experts at home. layers: its sparse layers, ours. pages: memory of the
    paged cache, None where the package holds all of it."""

    package: Package
    config: ModelConfig
    model: CudaModel
    layers: list[Any]
    arena: ExpertArena
    alias: torch.Tensor
    device: torch.device
    pages: PageMemory | None = None


@dataclass(frozen=True, slots=True)
class OpenedOffload:
    """The cache and what it means for a chunk. chunk_tokens: the longest whose activations fit. room: moves
    memory between experts and pages, None where the paged cache has all of its own."""

    offload: GpuOffload
    chunk_tokens: int
    room: PageRoom | None = None


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
        limit_torch(options.vram_bytes, device, 0)
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
    layers = adopt_sparse_layers(model, extension=package.extension)
    if len(layers) != arena.geometry.num_layers:
        raise MachineError(
            f"the model has {len(layers)} sparse layers, the arena {arena.geometry.num_layers}"
        )
    counter = _Counter(progress, 9 * arena.geometry.num_keys)
    stock_config.stc = ArenaTensors(
        files, arena, alias, sparse_layers(config), counter, compiles_kda=options.mode == "fast"
    )
    source = None if options.whole_cache else find_blocks(device)
    cache = root.Cache(
        model,
        max_num_tokens=(options.num_pages if source is None else 1) * PAGE_TOKENS,
        layer_type=root.CacheLayer_fp16,
        max_batch_size=options.max_streams + 1,  # one spare, for warm-up beside running sequences
    )
    try:
        with torch.inference_mode():
            model.load(device=f"cuda:{options.device}", progressbar=False)
        pages = None if source is None else _hold_pages(cache, source, options, device)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"the card has no room for the weights beside the experts and a cache of {options.cache_tokens} "
            f"tokens: lower -cs, or free the card ({str(error).splitlines()[0]})"
        ) from error
    gates = GatesBeside(package.extension, make_two_streams(device))
    text_model = CudaModel(model, cache, config.vocab_size, gates)
    return LoadedModel(package, config, text_model, layers, arena, alias, device, pages)


def _hold_pages(cache: Any, source: BlockSource, options: CudaOptions, device: torch.device) -> PageMemory:
    """Give the cache its pages; the first, which the longest chunk fills, have memory from the start."""
    first = -(-(options.max_chunk_tokens + 8) // PAGE_TOKENS)
    pages = hold_pages(cache, source, options.num_pages, first)
    limit_torch(options.vram_bytes, device, pages.num_bytes)
    return pages


def open_offload(loaded: LoadedModel, options: CudaOptions, fingerprint: str = "") -> OpenedOffload:
    """Run small shapes, measure what is left of the card, build the cache and time the lanes.

    fingerprint: of the routers, for kept heat. Raises MachineError.
    """
    loan = _probe(loaded, options)
    lane, courier = hire(loaded, options), None
    try:
        courier = hire_courier(loaded, options)
        return _open_with(loaded, options, loan, (lane, courier), fingerprint)
    except BaseException:
        for each in (lane, courier):
            if each is not None:
                each.close()
        raise


def _open_with(
    loaded: LoadedModel,
    options: CudaOptions,
    loan: LoanParams,
    lanes: tuple[CpuLane | None, Courier | None],
    fingerprint: str,
) -> OpenedOffload:
    geometry, wanted, (lane, courier) = loaded.arena.geometry, options.offload, lanes
    free, pages = free_vram(loaded.device, options.vram_bytes), loaded.pages
    unmapped = 0 if pages is None else pages.bytes_for(pages.all_pages) - pages.num_bytes
    chunk_slots = wanted.chunk_slots or CHUNK_SLOTS
    plan = plan_vram(geometry, free, options.mode, wanted.vram, chunk_slots, unmapped)
    tables = [tables_of(layer) for layer in loaded.layers]
    routers = [router_of(layer) for layer in loaded.layers]
    across = [layer.is_across for layer in loaded.layers]
    is_split = all(layer.has_launches for layer in loaded.layers)
    memory = GpuMemory(loaded.arena, loaded.alias, tables, plan, loan, routers, across, is_split=is_split)
    offload = GpuOffload(
        memory,
        options.max_streams,
        wanted,
        lane,
        courier,
        fingerprint=fingerprint,
        poisons=options.poisons,
    )
    room = None
    if pages is not None:
        limit = functools.partial(limit_torch, options.vram_bytes, loaded.device)
        room = PageRoom(pages, offload.loans, plan, geometry.expert_bytes, limit)
    with torch.inference_mode():
        offload.start(_calibrate(loaded, offload, lane, wanted))
    for layer in loaded.layers:
        layer.offload = offload
    chunk = min(options.max_chunk_tokens, max_chunk_tokens(plan, geometry.expert_bytes, loan))
    if chunk > PAGE_TOKENS:
        chunk = chunk // PAGE_TOKENS * PAGE_TOKENS
    logger.info(
        "cuda free_gib=%.2f slots=%d page_slots=%d activation_bytes_per_token=%d free_activation_bytes=%d "
        "chunk_tokens=%d",
        free / GIB,
        plan.num_slots,
        plan.page_slots,
        loan.activation_bytes_per_token,
        loan.free_activation_bytes,
        chunk,
    )
    for line in explain(plan):
        logger.info("vram %s", line)
    return OpenedOffload(offload, max(1, chunk), room)


def _calibrate(
    loaded: LoadedModel, offload: GpuOffload, lane: CpuLane | None, options: OffloadOptions
) -> Calibration:
    """Time the lanes, or take the defaults if no time is allowed for it."""
    guess = default_costs(max(1, options.crew_threads))
    if options.calibrate_s <= 0:
        return assume(guess, options.costs)

    def run(layer: int, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        loaded.layers[layer].bc.run_bszN(x, picks, weights)

    found = calibrate(
        GpuProbes(offload, run, lane).probes(),
        time.perf_counter,
        guess=guess,
        overrides=options.costs,
        budget_s=options.calibrate_s,
        max_experts=offload.policy.geometry.top_k,
    )
    for line in describe(found, offload.policy.geometry.expert_bytes):
        logger.info("offload %s", line)
    return found


def _probe(loaded: LoadedModel, options: CudaOptions) -> LoanParams:
    """Run chunks and decode steps of every width, experts at home; gives what a chunk's activations take."""
    model = loaded.model
    longest = min(options.max_chunk_tokens, options.num_pages * PAGE_TOKENS - 8)
    pages = list(range(-(-(longest + 8) // PAGE_TOKENS)))
    with torch.inference_mode():
        while not _fits(model, longest, pages):  # compiles too, and allocates what stays
            longest //= 2
        lengths = sorted({min(PROBE_TOKENS, longest), longest})
        peaks = [(tokens, _peak_of_prompt(loaded, tokens, pages)) for tokens in lengths]
        for width in range(1, options.max_streams + 1):
            if width <= options.num_pages:
                run_decode(model, width, 3)
    return fit_loan(peaks)


def _fits(model: CudaModel, num_tokens: int, pages: list[int]) -> bool:
    """Run a chunk; tells if there is memory for it. Raises MachineError if not even for a short one."""
    try:
        run_prompt(model, num_tokens, pages)
        return True
    except torch.OutOfMemoryError as error:
        if num_tokens <= PAGE_TOKENS:
            raise MachineError(
                f"the card has no room for a chunk of {num_tokens} tokens beside the weights: lower -cs, or "
                f"free the card ({str(error).splitlines()[0]})"
            ) from error
    torch.cuda.empty_cache()  # here, where the error's frames no longer hold the chunk
    return False


def _peak_of_prompt(loaded: LoadedModel, num_tokens: int, pages: list[int]) -> int:
    device = loaded.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = int(torch.cuda.memory_allocated(device))
    run_prompt(loaded.model, num_tokens, pages)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


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
            tokens, pages = [7 + row for row in range(width)], [[row] for row in range(width)]
            model.to_host(model.decode(tokens, states, pages, [step] * width, 0))  # no CPU job
    finally:
        for state in states:
            state.free()


def hire(loaded: LoadedModel, options: CudaOptions) -> CpuLane | None:
    """Start the CPU workers, none in exact mode. Raises MachineError."""
    wanted = options.offload
    if options.mode == "exact" or wanted.crew_threads < 1:
        return None
    crew = CrewOptions(
        wanted.crew_threads,
        wanted.crew_cpus,
        isa=Isa[wanted.crew_isa],
        clamp=Clamp.ACTIVATION,
        limit=loaded.config.swiglu_limit,
        poll_us=POLL_US,
        deadline_ms=wanted.deadline_ms,
    )
    return CpuLane(loaded.arena, options.max_streams, crew, loaded.package.extension, loaded.device)


def hire_courier(loaded: LoadedModel, options: CudaOptions) -> Courier | None:
    """Make the ring of the thread that orders copies ahead, None where nothing is fetched ahead."""
    if not options.offload.vram.ahead:
        return None
    # Cells of two steps: an order is done before its layer ends.
    cells = power_of_two(2 * loaded.arena.geometry.num_layers)
    return Courier(cells, pinning=RegisteredMemory(loaded.package.extension))


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
