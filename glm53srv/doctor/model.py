"""Checks of the model directory, and of the memory that serving it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glm53srv.config import NO_MODEL, NO_MODEL_TEXT, Config, EngineConfig
from glm53srv.doctor.files import (
    FETCH,
    check_index,
    check_revision,
    check_shards,
    check_sizes,
    largest_file,
)
from glm53srv.doctor.findings import Finding, fatal, ok, warn, wrap
from glm53srv.engine.factory import CPU_CHUNK_TOKENS
from glm53srv.errors import CheckpointError, ConfigError, MachineError
from glm53srv.machine import GIB, MachineFacts
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.model.plan import MemoryPlan, plan_memory
from glm53srv.model.state import PAGE_TOKENS
from glm53srv.model.tensor_needs import all_needs
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.offload.server_plan import largest_cache_tokens
from glm53srv.probe import Probe

LARGE_BYTES = 8 * GIB
"""From here on a model gains from huge pages."""

SLOW_LOAD_S = 300.0
"""Loading that takes longer than this gets a warning."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint that holds everything it should. weight_bytes: of the tensors that are read."""

    config: ModelConfig
    checkpoint: Checkpoint
    weight_bytes: int


def open_model(config: EngineConfig) -> OpenedModel:
    """Read configuration and headers, and look every tensor up. Raises CheckpointError."""
    model = load_model_config(config.model_dir)
    check_shards(config.model_dir)
    checkpoint = Checkpoint(config.model_dir)
    check_index(config.model_dir, checkpoint)
    needs = list(all_needs(model))
    checkpoint.check(needs)
    count_token_ids(config.model_dir, model.vocab_size)
    return OpenedModel(model, checkpoint, checkpoint.needed_bytes(needs))


def check_model(config: Config) -> tuple[list[Finding], OpenedModel | None]:
    """Check files and tensors."""
    model_dir = config.engine.model_dir
    if model_dir == NO_MODEL:
        return [wrap("checkpoint", ConfigError(NO_MODEL_TEXT))], None
    source = config.download
    if source.repo is not None and source.is_allowed and not (model_dir / "config.json").exists():
        remedy = f"serve fetches {source.repo} first, `glm53srv download` does it now"
        return [warn("checkpoint", f"{model_dir} holds no model yet", remedy)], None
    try:
        opened = open_model(config.engine)
    except CheckpointError as error:
        return [wrap("checkpoint", error, FETCH)], None
    kind = f"{opened.config.num_layers} layers"
    if opened.config.is_random:
        kind = "random weights, it speaks nonsense"
    elif opened.config.is_demo:
        kind = f"the small demo model, {kind}"
    text = f"{model_dir}: {kind}, {opened.weight_bytes / GIB:.2f} GiB of weights"
    found = [ok("checkpoint", text), check_sizes(opened.checkpoint)]
    return [*found, *check_revision(model_dir, config.download.revision)], opened


def cpu_plan(config: EngineConfig, model: ModelConfig, weight_bytes: int) -> MemoryPlan:
    """Give what the CPU engine takes."""
    return plan_memory(
        model,
        weight_bytes,
        -(-config.cache_tokens // PAGE_TOKENS),
        config.max_streams,
        config.chunk_tokens or CPU_CHUNK_TOKENS,
    )


def largest_cpu_cache(
    config: EngineConfig, model: ModelConfig, weight_bytes: int, room_bytes: int
) -> int | None:
    """Give the largest --cache-tokens with which the CPU engine fits, None if none does."""

    def fits(cache_tokens: int) -> bool:
        changed = replace(config, cache_tokens=cache_tokens)
        return cpu_plan(changed, model, weight_bytes).total_bytes <= room_bytes

    most_pages = config.max_streams * model.max_context_tokens // PAGE_TOKENS
    return largest_cache_tokens(fits, most_pages)


def check_memory(config: EngineConfig, opened: OpenedModel, machine: MachineFacts) -> Finding:
    """Compare what the CPU engine takes with what is there."""
    plan = cpu_plan(config, opened.config, opened.weight_bytes)
    parts = (
        f"weights {plan.mapped_bytes / GIB:.2f} + float32 copies {plan.converted_bytes / GIB:.2f} + "
        f"cache {plan.cache_bytes / GIB:.2f} + states {plan.state_bytes / GIB:.2f} + "
        f"activations {plan.activation_bytes / GIB:.2f} GiB"
    )
    if plan.total_bytes <= machine.usable_bytes:
        return ok("memory", f"{parts}, of {machine.usable_bytes / GIB:.1f} GiB usable")
    usable = f"{machine.usable_bytes / GIB:.1f}"
    if machine.limit_bytes is not None:
        usable += f" (control group limit {machine.limit_bytes / GIB:.1f})"
    text = f"too little memory: {parts} = {plan.total_bytes / GIB:.1f} GiB, usable {usable}"
    largest = largest_cpu_cache(config, opened.config, opened.weight_bytes, machine.usable_bytes)
    remedy = "free some, add some, or use a smaller checkpoint"
    if largest is not None:
        remedy = f"use --cache-tokens {largest} (-cs), or free some"
    return fatal("memory", MachineError(text), remedy)


def check_disk(opened: OpenedModel, probe: Probe) -> Finding:
    """Read a little of the checkpoint, at most for a second, and tell how long all of it would take."""
    path = largest_file(opened.checkpoint)
    rate = probe.read_rate(path)
    if rate is None:
        return ok("disk", f"{path}: too small, or its speed cannot be measured")
    seconds = opened.weight_bytes / rate
    text = f"{rate / 1e9:.2f} GB/s from {path.parent}, {seconds:.1f} s for the weights"
    if seconds > SLOW_LOAD_S:
        return warn("disk", text, "move the checkpoint to an NVMe drive of this machine")
    return ok("disk", text)
