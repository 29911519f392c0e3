"""What the kernels of a decode step read and write on the device, beside slots, tables, the host's words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm53srv.offload.device.gpu.gpu_memory import LayerTables
from glm53srv.offload.device.gpu.launch import COUNT_WORDS, PlanOutputs, cut_of, make_landing
from glm53srv.offload.device.layout import RecordLayout
from glm53srv.offload.geometry import ExpertGeometry


class DecodeBuffers:
    """Allocated once and reused by every layer and step: graphs know them by address. Engine thread only.

    log: int32 (2, layers, picks), the picks and the slots that were taken; lanes: int8 (layers, picks);
    counts: int32 (layers, COUNT_WORDS). cpu_count: int32 (picks + 1, picks + 1), the split's table. landing:
    where experts of the link are put, cut: how a shared one lies there. Of the experts in VRAM, if they are
    computed beside the copies of the others: hit_weights, float16 (rows, top_k), and hit_sums, float32
    (rows, hidden).
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        layout: RecordLayout,
        tables: Sequence[LayerTables],
        max_rows: int,
        num_landing: int,
        device: torch.device,
    ) -> None:
        """Allocate for steps of up to max_rows rows. Raises torch.OutOfMemoryError."""
        width, layers = max_rows * geometry.top_k, geometry.num_layers
        self.max_rows = max_rows
        self.log = torch.full((2, layers, width), -1, dtype=torch.int32, device=device)
        self.lanes = torch.zeros((layers, width), dtype=torch.int8, device=device)
        self.counts = torch.zeros((layers, COUNT_WORDS), dtype=torch.int32, device=device)
        self.cpu_count = torch.zeros((width + 1, width + 1), dtype=torch.int32, device=device)
        buffers = (min(num_landing, width), layout.record_bytes)
        # Random bytes: a shared expert's buffer is computed with what lies where the CPU's neurons would be.
        seeded = torch.Generator(device).manual_seed(0)
        self._landing_bytes = torch.randint(256, buffers, dtype=torch.uint8, device=device, generator=seeded)
        self.landing = make_landing(self._landing_bytes, layout.intermediate)
        self.cut = cut_of(layout)
        self.hit_weights = torch.zeros((max_rows, geometry.top_k), dtype=torch.float16, device=device)
        self.hit_sums = torch.zeros((max_rows, layout.hidden), dtype=torch.float32, device=device)
        # Slices made once: a step asks for each of them, and making one costs a microsecond of the host.
        self.count_rows = [self.counts[layer] for layer in range(layers)]
        self._tables = tables
        self._outputs = [
            [self._make_outputs(layer, rows * geometry.top_k) for layer in range(layers)]
            for rows in range(max_rows + 1)
        ]

    def outputs(self, rows: int, layer: int) -> PlanOutputs:
        """Give what the plan of a layer writes in a step of so many rows; of 0 rows, its tables alone."""
        return self._outputs[rows][layer]

    def _make_outputs(self, layer: int, width: int) -> PlanOutputs:
        tables = self._tables[layer]
        return PlanOutputs(
            tables.gate,
            tables.up,
            tables.down,
            tables.scales,
            self.log[0, layer, :width],
            self.lanes[layer, :width],
            self.log[1, layer, :width],
            self.counts[layer],
        )
