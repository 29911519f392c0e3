"""Everything that is checked, in the order in which it would fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm53srv.config import Config, EngineConfig
from glm53srv.doctor.findings import Finding, first_error, ok, warn, wrap
from glm53srv.doctor.gpu import check_gpus
from glm53srv.doctor.model import LARGE_BYTES, OpenedModel, check_disk, check_memory, check_model
from glm53srv.doctor.network import check_heat, check_port, check_tls
from glm53srv.doctor.plan import check_gpu_memory
from glm53srv.doctor.processor import (
    check_huge_pages,
    check_kernels,
    check_memlock,
    check_processor,
    check_ram,
    check_software,
)
from glm53srv.engine.factory import EngineChoice, VersionLookup, choose_engine
from glm53srv.errors import MachineError
from glm53srv.gpu_facts import GpuReport
from glm53srv.machine import MachineFacts
from glm53srv.model.config import MlpKind
from glm53srv.model.weight_sizes import checkpoint_sizes
from glm53srv.probe import Probe

Chooser = Callable[[EngineConfig, MachineFacts, VersionLookup], EngineChoice]
"""Picks the engine, or raises MachineError."""


def examine(config: Config, probe: Probe, choose: Chooser = choose_engine) -> list[Finding]:
    """Check everything. Reads file headers, and up to a second's worth of weights."""
    machine = probe.facts()
    engine, needs_gpu = _check_engine(config.engine, probe, choose)
    gpus = probe.gpus()
    files, opened = check_model(config)
    found = [
        *_check_machine(config.engine, probe, engine, needs_gpu),
        *check_gpus(gpus, machine, needs_gpu),
        *files,
        *_check_room(config, probe, gpus, opened, needs_gpu),
    ]
    if opened is not None:
        found.append(check_disk(opened, probe))
    is_large = opened is not None and opened.weight_bytes >= LARGE_BYTES
    return [*found, check_huge_pages(machine, is_large), *_check_paths(config)]


def require_machine(config: Config, probe: Probe, choose: Chooser = choose_engine) -> None:
    """Raise the first thing that keeps this machine from serving any model: before one is fetched."""
    machine = probe.facts()
    engine, needs_gpu = _check_engine(config.engine, probe, choose)
    found = _check_machine(config.engine, probe, engine, needs_gpu)
    if needs_gpu:
        found += check_gpus(probe.gpus(), machine, needs_gpu)
    _raise_first([*found, *_check_paths(config)])


def require_servable(config: Config, probe: Probe, choose: Chooser = choose_engine) -> None:
    """Raise the error of the first FATAL finding, if there is one.

    Leaves out what can only be a warning and takes time: the disk's speed, and a GPU that is not used.
    """
    require_machine(config, probe, choose)
    _, needs_gpu = _check_engine(config.engine, probe, choose)
    files, opened = check_model(config)
    gpus = probe.gpus() if needs_gpu else GpuReport()
    _raise_first([*files, *_check_room(config, probe, gpus, opened, needs_gpu)])


def _raise_first(findings: Sequence[Finding]) -> None:
    error = first_error(findings)
    if error is not None:
        raise error


def _check_machine(config: EngineConfig, probe: Probe, engine: Finding, needs_gpu: bool) -> list[Finding]:
    machine = probe.facts()
    return [
        *check_software(probe, needs_gpu),
        *check_processor(config, machine, needs_gpu),
        check_kernels(config, probe, machine, needs_gpu),
        check_ram(machine),
        engine,
    ]


def _check_room(
    config: Config, probe: Probe, gpus: GpuReport, opened: OpenedModel | None, needs_gpu: bool
) -> list[Finding]:
    """Compare what the model takes with what there is."""
    machine = probe.facts()
    if opened is None:
        return []
    if not needs_gpu:
        return [check_memory(config.engine, opened, machine), check_memlock(machine, 0, needs_gpu)]
    sizes = checkpoint_sizes(opened.config, opened.checkpoint)
    num_layers = opened.config.mlp_kinds.count(MlpKind.SPARSE)
    pinned_bytes = sizes.expert * num_layers * opened.config.moe.num_experts
    found = [check_gpu_memory(config, probe, opened)] if gpus.gpus else []
    return [*found, check_memlock(machine, pinned_bytes, needs_gpu)]


def _check_paths(config: Config) -> list[Finding]:
    return [
        *check_heat(config.engine.offload.heat_path),
        *check_tls(config.server),
        check_port(config.server),
    ]


def _check_engine(config: EngineConfig, probe: Probe, choose: Chooser) -> tuple[Finding, bool]:
    """Give the finding, and whether the engine needs a GPU."""
    machine = probe.facts()
    try:
        choice = choose(config, machine, probe.version)
    except MachineError as error:
        return wrap("engine", error), False
    text = f"{choice.name} ({choice.reason})"
    if machine.nvidia_devices and config.engine == "auto" and choice.name == "cpu":
        return warn("engine", text, "nothing: the CPU engine serves"), False
    return ok("engine", text), choice.name == "cuda"
