"""`glm53srv pin-triton`: let Triton's autotuners time themselves on this GPU, and keep what they chose."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from glm53srv.engine.cuda.loading import CudaOptions, LoadedModel, limit_vram, load_model, run_prompt
from glm53srv.engine.cuda.model import PAGE_TOKENS
from glm53srv.engine.cuda.package import Package, open_package
from glm53srv.engine.cuda.pins import forget_choices, read_choices, write_pins
from glm53srv.engine.cuda.synthetic_model import load_synthetic
from glm53srv.errors import MachineError
from glm53srv.machine import MachineFacts
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import load_model_config
from glm53srv.model.tensor_needs import all_needs
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.offload.device.options import OffloadOptions

PROMPT_TOKENS = (64, 96, 256, 1024, 2048, 4096, 8192)
"""Prompts that are run. From as many tokens as heads (64) on the chunked kernels take a prompt; some of them
tune anew for each range of lengths, and a prefill chunk has at most 8,192 tokens by default."""


@dataclass(frozen=True, slots=True)
class PinOptions:
    """What is timed and where it goes. model_dir: None for random weights of the published dimensions, of
    which num_layers. out: a file, None for tuning_dir and the name that the server looks for."""

    model_dir: Path | None
    num_layers: int | None
    out: Path | None
    tuning_dir: Path | None


def make_pins(options: PinOptions, machine: MachineFacts, say: Callable[[str], None]) -> Path:
    """Time the kernels and write the file; gives its path.

    Raises CheckpointError for the files, MachineError for the packages, the card, memory, or a file that
    cannot be written.
    """
    cuda = CudaOptions(
        OffloadOptions(mode="exact"), max_streams=1, cache_tokens=PROMPT_TOKENS[-1] + PAGE_TOKENS
    )
    package = open_package(cuda.mode, options.tuning_dir, pins_kernels=False)
    path = options.out or (options.tuning_dir or Path()) / package.pin_file
    forget_choices(package.autotuners)
    limit_vram(cuda)
    with tempfile.TemporaryDirectory() as directory:
        loaded = _load(package, cuda, options, machine, Path(directory))
        try:
            _run_prompts(loaded, say)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                "the card is too full to time the kernels: free it, or take fewer layers"
            ) from error
        finally:
            loaded.model.unload()
            loaded.arena.close()
    pins = read_choices(package.autotuners)
    if not pins:
        raise MachineError("no kernel was timed: the model's prompts run none of those that are tuned")
    about = f"{torch.cuda.get_device_name()}, {options.model_dir or 'published dimensions'}"
    try:
        write_pins(path, pins, about)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}; name another with --out") from error
    for name, pin in sorted(pins.items()):
        times = len(package.autotuners[name].cache)
        say(f"{name}: {dict(pin.kwargs)} warps {pin.num_warps} stages {pin.num_stages}, tuned {times} times")
    return path


def _run_prompts(loaded: LoadedModel, say: Callable[[str], None]) -> None:
    with torch.inference_mode():
        for num_tokens in PROMPT_TOKENS:
            if num_tokens > loaded.config.max_context_tokens:
                break
            run_prompt(loaded.model, num_tokens, list(range(-(-num_tokens // PAGE_TOKENS))))
            torch.cuda.synchronize(loaded.device)
            torch.cuda.empty_cache()
            say(f"prompt of {num_tokens} tokens done")


def _load(
    package: Package, cuda: CudaOptions, options: PinOptions, machine: MachineFacts, work_dir: Path
) -> LoadedModel:
    """Load without a cache of experts: they are read at home, and only other kernels are timed."""
    if options.model_dir is None:
        return load_synthetic(package, cuda, work_dir, options.num_layers, lambda part, stage: None)
    config = load_model_config(options.model_dir)
    checkpoint = Checkpoint(options.model_dir)
    checkpoint.check(all_needs(config))
    pinning = RegisteredMemory(package.extension)
    arena = ExpertArena.load(checkpoint, config, machine, ArenaOptions(pinning=pinning))
    try:
        return load_model(package, options.model_dir, config, arena, cuda, lambda part: None)
    except BaseException:
        arena.close()
        raise
