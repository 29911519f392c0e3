"""The home of all routed experts: one mapping, one record per expert, one copy.

    byte   0                    record_bytes            2 * record_bytes
           | layer 0, expert 0  | layer 0, expert 1     | ...      key = layer * num_experts + expert

The same bytes serve reads over the link, copies into slots, staging and the CPU's experts; see layout.py for
the inside of a record.
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import MachineError
from glm53srv.exl3_matrix import Exl3Matrix, ExpertTable, Float16
from glm53srv.machine import MachineFacts
from glm53srv.model.checkpoint import Checkpoint, QuantizedLinear
from glm53srv.model.config import ModelConfig
from glm53srv.model.linear import to_matrix
from glm53srv.offload.device.arena_fill import Extent, FillReport, fill, read_extent
from glm53srv.offload.device.layout import SCALE_ITEM_BYTES, Part, RecordLayout, expert_needs, plan_records
from glm53srv.offload.device.pinning import NoPinning, Pinning
from glm53srv.offload.device.region import GIB, Pages, Region
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.progress import Progress

logger = logging.getLogger(__name__)

SPARE_BYTES = GIB
"""Memory that must be left beside the arena, for everything else that loading takes."""


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """pages: the best kind to try. num_readers: threads that read the files. pinning: see pinning.py."""

    pages: Pages = Pages.HUGE
    num_readers: int = 4
    pinning: Pinning = field(default_factory=NoPinning)


@dataclass(frozen=True, slots=True)
class SampleReport:
    """Records compared with the files. checksum: CRC-32 over their bytes in the arena, in sample order."""

    keys: tuple[int, ...]
    num_bytes: int
    checksum: int


class ExpertArena:
    """Owns the records and the table of scales. Filled by load(); read-only afterwards, from any thread.

    A view keeps the memory alive, so close() only ends the pinning and forgets; nothing is unmapped under a
    reader.
    """

    def __init__(self, layout: RecordLayout, geometry: ExpertGeometry, options: ArenaOptions) -> None:
        """Map empty memory for all experts. Raises MachineError."""
        self.layout = layout
        self.geometry = geometry
        self._options = options
        self.region = Region(geometry.num_keys * layout.record_bytes, options.pages)
        self.records: NDArray[np.uint8] = self.region.array().reshape(geometry.num_keys, -1)
        """uint8 (num_keys, record_bytes)."""
        self._scale_region = Region(geometry.num_keys * layout.num_scales * SCALE_ITEM_BYTES)
        self.scales: Float16 = self._scale_region.array().view(np.float16).reshape(geometry.num_keys, -1)
        """float16 (num_keys, num_scales); layout.scale_range finds a vector."""
        self._sources: list[Extent] = []

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        machine: MachineFacts,
        options: ArenaOptions | None = None,
        progress: Progress = lambda fraction, stage: None,
    ) -> ExpertArena:
        """Map, fill and pin. Raises CheckpointError for the files, MachineError for memory."""
        options = options or ArenaOptions()
        layout, geometry = plan_records(checkpoint, config)
        arena_bytes = geometry.num_keys * (layout.record_bytes + layout.num_scales * SCALE_ITEM_BYTES)
        require_memory(arena_bytes, machine)
        arena = cls(layout, geometry, options)
        arena._sources = _list_extents(checkpoint, config, layout, geometry)
        report = fill(
            arena.region.array(),
            arena._sources,
            options.num_readers,
            drops_cache=2 * arena_bytes > machine.usable_bytes,
            progress=progress,
        )
        arena._fill_scales(checkpoint, config)
        options.pinning.pin(arena.region)
        arena.records.flags.writeable = False
        arena.scales.flags.writeable = False
        _log_loaded(arena, report)
        return arena

    def record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """View one expert: uint8 (record_bytes,), the unit of a copy."""
        view: NDArray[np.uint8] = self.records[self.key(layer, expert)]
        return view

    def trellis(self, layer: int, expert: int, part: Part) -> NDArray[np.int16]:
        """View one matrix as the checkpoint stores it: int16 (in/16, out/16, words)."""
        begin = self.layout.offset(part)
        view = self.record(layer, expert)[begin : begin + self.layout.num_bytes(part)]
        return view.view(np.int16).reshape(self.layout.shape(part))

    def suh(self, layer: int, expert: int, part: Part) -> Float16:
        """View the scales of the inputs: float16 (in,)."""
        return self._scale(layer, expert, self.layout.scale_range(part, is_output=False))

    def svh(self, layer: int, expert: int, part: Part) -> Float16:
        """View the scales of the outputs: float16 (out,)."""
        return self._scale(layer, expert, self.layout.scale_range(part, is_output=True))

    def matrix(self, layer: int, expert: int, part: Part) -> Exl3Matrix:
        """View one matrix as the kernels take it."""
        stored = QuantizedLinear(
            key=f"sparse layer {layer}, expert {expert}, {part.name.lower()}",
            trellis=self.trellis(layer, expert, part),
            suh=self.suh(layer, expert, part),
            svh=self.svh(layer, expert, part),
            codebook=self.layout.codebook,
        )
        return to_matrix(stored)

    def experts(self, layer: int) -> list[tuple[Exl3Matrix, Exl3Matrix, Exl3Matrix]]:
        """View a layer's experts as the kernels take them."""
        return [
            (
                self.matrix(layer, expert, Part.GATE),
                self.matrix(layer, expert, Part.UP),
                self.matrix(layer, expert, Part.DOWN),
            )
            for expert in range(self.geometry.num_experts)
        ]

    def table(self, layer: int) -> ExpertTable:
        """View a layer as a table for the kernels."""
        return ExpertTable(self.experts(layer))

    def address(self, layer: int, expert: int) -> int:
        """Give the address of a record; a multiple of 256."""
        return self.region.address + self.key(layer, expert) * self.layout.record_bytes

    def key(self, layer: int, expert: int) -> int:
        """Number an expert. Raises IndexError for one that does not exist."""
        if not (0 <= layer < self.geometry.num_layers and 0 <= expert < self.geometry.num_experts):
            raise IndexError(f"layer {layer}, expert {expert} of {self.geometry}")
        return layer * self.geometry.num_experts + expert

    def verify(self, num_samples: int, seed: int = 0) -> SampleReport:
        """Compare random records with the files they came from; slow, on demand.

        Raises MachineError naming the first record that differs: memory or disk changed it.
        """
        count = min(num_samples, self.geometry.num_keys)
        keys = np.random.default_rng(seed).choice(self.geometry.num_keys, count, replace=False).tolist()
        checksum, num_bytes = 0, 0
        for key in keys:
            for part in Part:
                extent = self._sources[len(Part) * key + part]
                there = _read_again(extent)
                here = self.records[key][self.layout.offset(part) :][: extent.num_bytes]
                if not np.array_equal(here, there):
                    layer, expert = divmod(key, self.geometry.num_experts)
                    raise MachineError(
                        f"{part.name.lower()} of expert {expert}, sparse layer {layer} differs from "
                        f"{extent.path} at byte {extent.offset}: check memory and disk"
                    )
                checksum = zlib.crc32(here.data, checksum)
                num_bytes += extent.num_bytes
        return SampleReport(tuple(keys), num_bytes, checksum)

    def abandon(self) -> None:
        """Never unmap it: a thread that cannot be ended still uses it."""
        self.region.abandon()
        self._scale_region.abandon()

    def close(self) -> None:
        """End the pinning. Idempotent."""
        self._options.pinning.release()

    def _scale(self, layer: int, expert: int, place: slice) -> Float16:
        view: Float16 = self.scales[self.key(layer, expert), place]
        return view

    def _fill_scales(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        for key in range(self.geometry.num_keys):
            needs = expert_needs(config, *divmod(key, self.geometry.num_experts))
            for part, need in zip(Part, needs, strict=True):
                stored = checkpoint.quantized(need)
                self.scales[key][self.layout.scale_range(part, is_output=False)] = stored.suh
                self.scales[key][self.layout.scale_range(part, is_output=True)] = stored.svh


def require_memory(num_bytes: int, machine: MachineFacts) -> None:
    """Raise MachineError if an arena of num_bytes does not fit."""
    if num_bytes + SPARE_BYTES > machine.usable_bytes:
        raise MachineError(
            f"the routed experts need {num_bytes / GIB:.2f} GiB of memory and {SPARE_BYTES / GIB:.0f} beside "
            f"it, {machine.usable_bytes / GIB:.2f} are usable; free memory, or leave --offload away to read "
            "the experts from the files"
        )


def _list_extents(
    checkpoint: Checkpoint, config: ModelConfig, layout: RecordLayout, geometry: ExpertGeometry
) -> list[Extent]:
    """List where every trellis comes from and goes to: gate, up, down of key 0, of key 1, ..."""
    extents = []
    for key in range(geometry.num_keys):
        needs = expert_needs(config, *divmod(key, geometry.num_experts))
        for part, need in zip(Part, needs, strict=True):
            name = f"{need.key}.trellis"
            info = checkpoint.info(name)
            target = key * layout.record_bytes + layout.offset(part)
            extents.append(Extent(checkpoint.path(name), info.offset, info.num_bytes, target))
    return extents


def _read_again(extent: Extent) -> NDArray[np.uint8]:
    """Read an extent from its file, from the disk where the kernel lets go of its copy."""
    target = np.empty(extent.num_bytes, np.uint8)
    descriptor = os.open(extent.path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, extent.offset, extent.num_bytes, os.POSIX_FADV_DONTNEED)
        read_extent(descriptor, extent, target)
    finally:
        os.close(descriptor)
    return target


def _log_loaded(arena: ExpertArena, report: FillReport) -> None:
    region, huge = arena.region, arena.region.huge_bytes()
    logger.info(
        "arena experts=%d bytes=%d read_gb_s=%.2f readers=%d pages=%s huge_bytes=%s pinning=%s",
        arena.geometry.num_keys,
        region.num_bytes,
        report.gb_per_s,
        report.num_readers,
        region.pages.name.lower(),
        "unknown" if huge is None else huge,
        arena._options.pinning.name,
    )
    if region.refusal:
        logger.info("arena: larger pages were refused (%s)", region.refusal)
