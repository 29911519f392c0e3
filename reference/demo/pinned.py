"""One launch configuration per fla kernel instead of timing them all.

flash-linear-attention lists 4 to 36 configurations for each of the dozen kernels of KDA. Triton compiles and
times every one before a kernel's first run, on one thread: the first step took 259 s on an H200 machine. A
kernel with a single configuration is compiled once and never timed, whatever its key. Compiled with Triton
3.7.1 for compute capability 9.0 at the demo's head size, the choices need at most 147,456 bytes of shared
memory; an H200 lends a block 232,448.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

_TILE = 64
"""Wanted rows or columns of a tile: fills a tensor core's 64 x 64 product."""
_WARPS = 4
_SMALL_WARPS = 2
"""For kernels on 16 x 16 blocks, which leave more warps without work."""
_STAGES = 2
"""The fewest with any overlap of loading and computing, so the least shared memory."""


class LaunchConfig(Protocol):
    """What triton.Config has."""

    kwargs: dict[str, Any]
    num_warps: int
    num_stages: int


def choose(configs: Sequence[LaunchConfig], kernel: str) -> LaunchConfig:
    """Take the one configuration nearest to the wanted tiles, then warps, then stages."""
    warps = _SMALL_WARPS if "intra" in kernel or "inter_solve" in kernel else _WARPS

    def distance(config: LaunchConfig) -> tuple[int, int, int]:
        tiles = sum(abs(size - _TILE) for size in config.kwargs.values() if isinstance(size, int))
        return tiles, abs(config.num_warps - warps), abs(config.num_stages - _STAGES)

    return min(configs, key=distance)


def _autotuners(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Find a module's autotuners, also below decorators: triton.heuristics keeps its function in .fn."""
    from triton.runtime.autotuner import Autotuner

    for name, value in list(vars(module).items()):
        while value is not None:
            if isinstance(value, Autotuner):
                yield name, value
            value = (
                getattr(value, "fn", None) if type(value).__module__.startswith(("triton.", "fla.")) else None
            )


def pin_kernels(package: str = "fla") -> dict[str, str]:
    """Pin each autotuned kernel in the package's loaded modules; give the choices by kernel name.

    Call it after importing the operations in use and before their first run. Early pruning hooks do not run
    for a single configuration: KDA's kernels have none.
    """
    chosen = {}
    for module_name in sorted(sys.modules):
        if module_name != package and not module_name.startswith(f"{package}."):
            continue
        for name, tuner in _autotuners(sys.modules[module_name]):
            best = choose(tuner.configs, name)
            tuner.configs = [best]
            tuner.cache.clear()
            chosen[name] = f"{best.kwargs} warps {best.num_warps} stages {best.num_stages}"
    return chosen
