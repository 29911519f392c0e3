"""Checks of the model directory, and of the memory that serving it takes."""

from __future__ import annotations

from dataclasses import dataclass

from glm53srv.config import NO_MODEL, NO_MODEL_TEXT, Config, EngineConfig
from glm53srv.doctor.files import (
    FETCH,
    check_index,
    check_revision,
    check_shards,
    check_sizes,
    largest_file,
)
from glm53srv.doctor.findings import Finding, ok, warn, wrap
from glm53srv.engine.factory import CPU_CHUNK_TOKENS
from glm53srv.errors import CheckpointError, ConfigError, MachineError
from glm53srv.machine import GIB, MachineFacts
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.model.plan import MemoryPlan, plan_memory
from glm53srv.model.state import PAGE_TOKENS
from glm53srv.model.tensor_needs import all_needs
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.probe import Probe

LARGE_BYTES = 8 * GIB
"""From here on a model takes long to load, and what slows that is worth a line."""

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
    try:
        opened = open_model(config.engine)
    except CheckpointError as error:
        return [wrap("checkpoint", error, FETCH)], None
    kind = "random weights, it speaks nonsense"
    if not opened.config.is_random:
        kind = f"{opened.config.num_layers} layers"
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


def check_memory(plan: MemoryPlan, machine: MachineFacts) -> Finding:
    """Compare what the CPU engine takes with what is there."""
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
    text = (
        f"too little memory: {parts} = {plan.total_bytes / GIB:.1f} GiB, usable {usable}; free some, "
        "use a smaller --cache-tokens (`glm53srv doctor --plan` names the largest), or a smaller checkpoint"
    )
    return wrap("memory", MachineError(text))


def check_disk(opened: OpenedModel, probe: Probe) -> list[Finding]:
    """Read a little of a large checkpoint and tell how long all of it would take."""
    if opened.weight_bytes < LARGE_BYTES:
        return []
    path = largest_file(opened.checkpoint)
    rate = probe.read_rate(path)
    if rate is None:
        return [ok("disk", f"{path}: its speed could not be measured")]
    seconds = opened.weight_bytes / rate
    text = f"{rate / 1e9:.2f} GB/s from {path.parent}, {seconds:.0f} s for the weights"
    if seconds > SLOW_LOAD_S:
        return [warn("disk", text, "move the checkpoint to an NVMe drive of this machine")]
    return [ok("disk", text)]
