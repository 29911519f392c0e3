"""Everything that is checked, in the order in which it would fail."""

from __future__ import annotations

from collections.abc import Callable

from glm53srv.config import Config, EngineConfig
from glm53srv.doctor.findings import Finding, first_error, ok, warn, wrap
from glm53srv.doctor.gpu import check_gpus
from glm53srv.doctor.model import LARGE_BYTES, check_disk, check_memory, check_model, cpu_plan
from glm53srv.doctor.network import check_port, check_tls
from glm53srv.doctor.plan import check_gpu_memory
from glm53srv.doctor.processor import (
    check_huge_pages,
    check_kernels,
    check_memlock,
    check_processor,
    check_software,
)
from glm53srv.engine.factory import EngineChoice, choose_engine
from glm53srv.errors import MachineError
from glm53srv.gpu_facts import GpuReport
from glm53srv.machine import MachineFacts
from glm53srv.model.config import MlpKind
from glm53srv.model.weight_sizes import checkpoint_sizes
from glm53srv.probe import Probe

Chooser = Callable[[EngineConfig, MachineFacts], EngineChoice]
"""Picks the engine, or raises MachineError."""


def examine(config: Config, probe: Probe, choose: Chooser = choose_engine) -> list[Finding]:
    """Check everything. Reads file headers, and of a large checkpoint up to a second's worth of data."""
    return _examine(config, probe, choose, is_whole=True)


def require_servable(config: Config, probe: Probe, choose: Chooser = choose_engine) -> None:
    """Raise the error of the first FATAL finding, if there is one.

    Leaves out what can only be a warning and takes time: the disk's speed, and a GPU that is not used.
    """
    error = first_error(_examine(config, probe, choose, is_whole=False))
    if error is not None:
        raise error


def _examine(config: Config, probe: Probe, choose: Chooser, *, is_whole: bool) -> list[Finding]:
    machine = probe.facts()
    engine, name = _check_engine(config.engine, machine, choose)
    needs_gpu = name == "cuda"
    found = [
        *check_software(probe, needs_gpu),
        *check_processor(config.engine, machine, needs_gpu),
        check_kernels(config.engine, probe, machine, needs_gpu),
        engine,
    ]
    gpus = probe.gpus() if is_whole or needs_gpu else GpuReport()
    if is_whole or needs_gpu:
        found += check_gpus(gpus, machine, needs_gpu)
    files, opened = check_model(config)
    found += files
    pinned_bytes = 0
    if opened is not None:
        if needs_gpu:
            sizes = checkpoint_sizes(opened.config, opened.checkpoint)
            num_layers = opened.config.mlp_kinds.count(MlpKind.SPARSE)
            pinned_bytes = sizes.expert * num_layers * opened.config.moe.num_experts
            if gpus.gpus:
                found.append(check_gpu_memory(config, probe))
        else:
            found.append(check_memory(cpu_plan(config.engine, opened.config, opened.weight_bytes), machine))
        if is_whole:
            found += check_disk(opened, probe)
    is_large = opened is not None and opened.weight_bytes >= LARGE_BYTES
    return [
        *found,
        check_memlock(machine, pinned_bytes, needs_gpu),
        check_huge_pages(machine, is_large),
        *check_tls(config.server),
        check_port(config.server),
    ]


def _check_engine(config: EngineConfig, machine: MachineFacts, choose: Chooser) -> tuple[Finding, str]:
    """Give the finding and the engine's name, "" if none can run."""
    try:
        choice = choose(config, machine)
    except MachineError as error:
        return wrap("engine", error), ""
    text = f"{choice.name} ({choice.reason})"
    if machine.nvidia_devices and config.engine == "auto" and choice.name == "cpu":
        return warn("engine", text, "nothing: the CPU engine serves"), choice.name
    return ok("engine", text), choice.name
