"""What a sparse layer does in a decode step: its plan, the copies that it waits for, the sums of all lanes.

Enqueues only, on the main stream and the side streams; what is planned by is the host's: gpu_offload.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.copy_kernel import USUAL, launch_gather
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.decode_buffers import DecodeBuffers
from glm53srv.offload.device.gpu.gpu_memory import GpuMemory
from glm53srv.offload.device.gpu.gpu_slots import GpuSlots
from glm53srv.offload.device.gpu.landing_order import LayerWork, OwnLaunches, enqueue_copies
from glm53srv.offload.device.gpu.launch import PlanInputs
from glm53srv.offload.device.gpu.look_ahead import GuessedModel, LookAhead, make_side_streams
from glm53srv.offload.device.gpu.plan_kernel import launch_plan
from glm53srv.offload.device.gpu.point_kernel import launch_point
from glm53srv.offload.device.gpu.step_words import StepWords


class DecodeLayers:
    """Owns the buffers of a step and the look-ahead. Engine thread only.

    rows: of the step whose layers are called, 0 outside of steps. lane: the CPU workers, None in exact mode.
    landing: where experts of the link are put; copy_shape: of the copies there; is_split: experts in VRAM are
    computed before the others. Graphs that were captured before one of these three changed do as before.
    """

    def __init__(
        self,
        memory: GpuMemory,
        store: GpuSlots,
        max_rows: int,
        lane: CpuLane | None,
        courier: Courier | None = None,
    ) -> None:
        """Allocate for steps of up to max_rows rows. courier: as of LookAhead. Raises
        torch.OutOfMemoryError."""
        arena, plan = memory.arena, memory.plan
        geometry, device = arena.geometry, memory.alias.device
        self._arena, self._store = arena, store
        self._base = int(memory.alias.data_ptr())
        self.rows = 0
        self.lane = lane
        self.tables = memory.tables
        self.buffers = DecodeBuffers(geometry, arena.layout, self.tables, max_rows, plan.landing, device)
        self.words = StepWords(geometry, device)
        self.landing = self.buffers.landing
        self.copy_shape = USUAL
        self._may_split = memory.is_split and lane is not None
        self.is_split = self._may_split
        self._ready: Any = None  # events of the layer that runs
        self._planned: Any = None
        # Slices made once, as in the buffers.
        self.slot_rows = [store.device_table[layer] for layer in range(geometry.num_layers)]
        self._streams = make_side_streams(device)
        homes = [self.home(layer) for layer in range(geometry.num_layers)]
        size, guessed = arena.layout.record_bytes, (memory.routers, memory.across)
        model = GuessedModel(geometry, size, *guessed, self.slot_rows, homes)
        self.look_ahead = LookAhead(model, plan.ahead, max_rows, device, self._streams, courier)

    @property
    def has_hits(self) -> bool:
        """Tell whether experts in VRAM are computed by a launch of their own."""
        return self.is_split and self.landing.num_experts > 0

    def split_launches(self, is_wanted: bool) -> None:
        """Compute experts in VRAM before the others from now on, where layers may be split; for
        measurements."""
        self.is_split = self._may_split and is_wanted

    def home(self, layer: int) -> int:
        """Give the device's address of a layer's first record."""
        geometry = self._arena.geometry
        return self._base + layer * geometry.num_experts * self._arena.layout.record_bytes

    def point(self, layer: int, slots: torch.Tensor) -> None:
        """Fill a layer's tables whole. slots: int32 (experts,) on the device, -1 for home."""
        layout = self._arena.layout
        places = (layout.record_bytes, layout.offsets[1], layout.offsets[2])
        outputs, own_scales = self.buffers.outputs(0, layer), self.tables[layer].own_scales
        launch_point(slots, self._store.addresses, outputs, own_scales, self.home(layer), places)

    def begin_router(self) -> None:
        """Note that a layer's router has its input."""
        self._ready = self._streams.main().record_event()

    def plan(self, layer: int, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        """Plan a layer behind its router; picks and weights may be changed."""
        layout = self._arena.layout
        inputs = PlanInputs(
            picks=picks,
            weights=weights,
            x=x,
            slots=self.slot_rows[layer],
            heat=self.words.heat_rows[layer],
            cpu_count=self.buffers.cpu_count,
            own_scales=self.tables[layer].own_scales,
            slot_addresses=self._store.addresses,
            offers=self.words.offers,
            offer_head=self.words.head,
            home=self.home(layer),
            layer=layer,
            record_bytes=layout.record_bytes,
            up_offset=layout.offsets[1],
            down_offset=layout.offsets[2],
            num_parts=layout.num_parts,
            part_blocks=layout.num_blocks // layout.num_parts,
        )
        ring = None if self.lane is None else self.lane.ring
        ahead = self.look_ahead.ahead_of(layer)
        outputs = self.buffers.outputs(self.rows, layer)
        launch_plan(inputs, outputs, self.landing, ring, ahead, self._hit_weights())
        self._planned = self._streams.main().record_event()

    def land(self, layer: int, x: torch.Tensor, own: OwnLaunches | None) -> None:
        """Copy the experts that the layer just planned wants over the link; see GpuOffload.land_layer."""
        run_hits, weights = None, self._hit_weights()
        if weights is not None:
            assert own is not None, "the plan left experts in VRAM to a launch that the layer does not have"
            run_hits = functools.partial(self._run_hits, own, weights)
        run_shared = None if own is None else own.shared
        work = LayerWork(self._planned, self._ready, x, self.gather, run_hits, run_shared)
        enqueue_copies(self._streams, self.look_ahead, layer, work)

    def gather(self) -> None:
        """Enqueue the copies that landing lists, by the kernel that decode steps use."""
        cut = None if self.lane is None else self.buffers.cut
        launch_gather(self.landing, self._arena.layout.record_bytes, self.copy_shape, cut=cut)

    def combine(self, layer: int, out: torch.Tensor) -> None:
        """Add to a layer's sum, float32 (rows, hidden), the CPU's part, behind a wait for it, and that of
        experts which were computed before the others."""
        if self.lane is not None:
            sums = self.buffers.hit_sums if self.has_hits else None
            launch_combine(out, self.buffers.count_rows[layer], layer, self.lane.ring, sums)

    def _run_hits(self, own: OwnLaunches, weights: torch.Tensor) -> None:
        # By a kernel: a copy might queue behind staged experts.
        torch.mul(own.hits(weights), 1.0, out=self.buffers.hit_sums[: self.rows])

    def _hit_weights(self) -> torch.Tensor | None:
        """Give the weights of experts in VRAM, for the rows of this step; None if all go in one launch."""
        return self.buffers.hit_weights[: self.rows] if self.has_hits else None
