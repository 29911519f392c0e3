"""Loads a model of random weights at the published dimensions, as loading.py loads a checkpoint."""

from __future__ import annotations

from pathlib import Path

from glm53srv.engine.cuda.loading import CudaOptions, LoadedModel, load_model
from glm53srv.engine.cuda.package import Package
from glm53srv.engine.cuda.synthetic import SyntheticTensors, fill_arena
from glm53srv.model.config import load_model_config
from glm53srv.model.published_files import write_published_files
from glm53srv.offload.device.arena import ArenaOptions
from glm53srv.offload.device.gpu.registered import RegisteredMemory
from glm53srv.progress import Progress

FILL_THREADS = 14
"""Threads that write the arena; more than memory's channels are of no use."""


def load_synthetic(
    package: Package, options: CudaOptions, work_dir: Path, num_layers: int | None, progress: Progress
) -> LoadedModel:
    """Draw and load the first num_layers layers, all by default. work_dir: an empty directory, for now.

    Check the memory before (synthetic_plan.require_host_memory). Raises ConfigError for layers that are not
    there, MachineError for the card or host memory.
    """
    write_published_files(work_dir, num_layers)
    config = load_model_config(work_dir)
    progress(0.0, "drawing the experts")
    arena = fill_arena(config, ArenaOptions(pinning=RegisteredMemory(package.extension)), FILL_THREADS)
    try:
        return load_model(
            package,
            work_dir,
            config,
            arena,
            options,
            lambda part: progress(0.5 + 0.5 * part, "drawing the weights"),
            lambda files, device: SyntheticTensors(config, arena, device),
        )
    except BaseException:
        arena.close()
        raise
