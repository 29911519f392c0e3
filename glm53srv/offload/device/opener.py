"""Builds the simulated offload while a model loads: after the check of its tensors, before its layers."""

from __future__ import annotations

from glm53srv.machine import read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig
from glm53srv.model.fingerprint import routing_fingerprint
from glm53srv.model.linear import KernelContext
from glm53srv.model.loading import ExpertSource
from glm53srv.offload.device.arena import ExpertArena, require_memory
from glm53srv.offload.device.layout import plan_records, sparse_layers
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.simulated_gpu import SimulatedOffload, plan_slots
from glm53srv.progress import Progress

FILL_BEGIN, FILL_SHARE = 0.1, 0.049
"""The arena's part of the decoder's progress: between its checks, at 0.1, and its layers, from 0.15 on."""


class OffloadOpener:
    """Builds the offload when the decoder's loader has found the checkpoint whole, and remembers it."""

    def __init__(
        self, context: KernelContext, max_rows: int, options: OffloadOptions, progress: Progress | None
    ) -> None:
        self._context = context
        self._max_rows = max_rows
        self._options = options
        self._progress = progress or (lambda fraction, stage: None)
        self.offload: SimulatedOffload | None = None

    def __call__(self, checkpoint: Checkpoint, config: ModelConfig) -> ExpertSource:
        """Fill the arena and give the experts of its layers. Raises CheckpointError or MachineError."""
        machine = read_machine()
        layout, geometry = plan_records(checkpoint, config)
        plan = plan_slots(geometry, self._options)
        require_memory(layout.record_bytes * (geometry.num_keys + plan.num_slots), machine)
        progress = self._progress
        arena = ExpertArena.load(
            checkpoint,
            config,
            machine,
            progress=lambda part, stage: progress(FILL_BEGIN + FILL_SHARE * part, stage),
        )
        fingerprint = routing_fingerprint(checkpoint, config, sparse_layers(config))
        try:
            self.offload = SimulatedOffload(
                self._context, config, arena, self._max_rows, self._options, fingerprint=fingerprint
            )
        except BaseException:
            arena.close()
            raise
        return self.offload.layer

    def close(self) -> None:
        """Close what was built so far."""
        if self.offload is not None:
            self.offload.close()
