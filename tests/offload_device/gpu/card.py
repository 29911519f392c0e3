"""An offload on a GPU and the sparse layers around it, without a GPU: kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from glm53srv.kernels import Clamp, KernelPool, Precision
from glm53srv.offload.calibrate import Calibration
from glm53srv.offload.cost import CostModel, Mode
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.courier import Courier
from glm53srv.offload.device.crew import CrewOptions
from glm53srv.offload.device.gpu.cpu_lane import CpuLane
from glm53srv.offload.device.gpu.gpu_memory import GpuMemory, LayerTables
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.offload.device.gpu.landing_order import OwnLaunches
from glm53srv.offload.device.gpu.launch import RouterWeights
from glm53srv.offload.device.layout import Part
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.elastic import LoanParams
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.vram_plan import GIB, VramOptions, plan_vram
from tests.offload_device.gpu import fake_cuda
from tests.offload_device.gpu.pointing import pointed_table

HIDDEN, TOP_K, LAYERS, EXPERTS, MAX_ROWS, LIMIT = 128, 4, 3, 24, 4, 10.0
CHUNK, SLOTS = 4, 32
COSTS = CostModel(0.02, 0.19, 0.19, 0.01)
TOLERANCE = 2e-6
"""Sums of float32 in another order."""


class Card:
    """An offload and the sparse layers around it. Their shared expert adds a formula."""

    def __init__(
        self,
        arena: ExpertArena,
        pool: KernelPool,
        mode: Mode,
        *,
        ahead: int = 2,
        landing: int = 16,
        has_courier: bool = True,
        page_chunks: int = 0,
    ) -> None:
        """Steps count as captured ones while is_captured, since others fetch nothing ahead.

        page_chunks: chunks of slots whose memory is that of pages one day.
        """
        self.is_captured = True
        self.arena, self.pool, self.rng = arena, pool, np.random.default_rng(5)
        self.num_kept_ahead = 0
        self.guesses: list[list[int]] = []  # of each step: fetched, and right
        self.direction = self.rng.normal(size=HIDDEN)
        size, geometry = arena.layout.record_bytes, arena.geometry
        vram = VramOptions(
            reserve_gib=0.0,
            stage_gib=8 * size / GIB * 1.001,
            elastic_gib=(SLOTS - CHUNK - page_chunks * CHUNK) * size / GIB * 1.001,
            landing=landing,
            ahead=ahead,
        )
        free = (SLOTS + vram.num_buffers) * size
        plan = plan_vram(geometry, free, mode, vram, CHUNK, page_chunks * CHUNK * size)
        assert plan.num_slots == SLOTS
        self.tables = [self._tables(layer) for layer in range(LAYERS)]
        gates = self.rng.normal(size=(LAYERS, HIDDEN, EXPERTS)) / HIDDEN**0.5
        self.routers = [RouterWeights(torch.from_numpy(gate).half(), torch.zeros(EXPERTS)) for gate in gates]
        memory = GpuMemory(
            arena,
            torch.from_numpy(arena.region.array()),
            self.tables,
            plan,
            LoanParams(activation_bytes_per_token=size // 32, free_activation_bytes=0),
            [None, *self.routers[1:]],
            [False, False, True],
            is_split=True,
        )
        options = OffloadOptions(
            mode=mode,
            vram=vram,
            residency=ResidencyParams(num_offers=6),
            chunk_slots=CHUNK,
            copies_per_step=1,
            stage_min_picks=64,
        )
        lane = None if mode == "exact" else self.hire()
        courier = Courier(8, first_seq=2**31 - 9) if has_courier else None
        self.offload = GpuOffload(memory, MAX_ROWS, options, lane, courier=courier, poisons=True)
        self.offload.start(Calibration(COSTS, copy_ms=0.4))
        self.least_bytes = self.offload.store.num_bytes

    def hire(self) -> CpuLane:
        crew = CrewOptions(1, precision=Precision.EXACT32, limit=LIMIT, deadline_ms=60_000)
        return CpuLane(self.arena, MAX_ROWS, crew, fake_cuda.FakeDriver(), torch.device("cpu"))

    def decode(self, rows: int) -> None:
        """Run a step's layers and check each; the picks are the router's, mostly of one direction of x."""
        offload = self.offload
        first_job = offload.begin_decode(rows, is_captured=self.is_captured)
        if offload.lane is not None:
            offload.lane.ring.first_seq.fill_(first_job)
        for layer in range(LAYERS):
            x = self.direction + 0.8 * self.rng.normal(size=(rows, HIDDEN))
            self._decode_layer(layer, x.astype(np.float16))
        told = offload.look_ahead.told.sum(0)[:2].tolist()
        self.guesses.append(told)
        offload.end_decode(1.0)
        offload.finish_decode()

    def _decode_layer(self, layer: int, x: np.ndarray) -> None:
        offload, own = self.offload, torch.from_numpy(x)
        scores = x.astype(np.float32) @ self.routers[layer].gate.numpy().astype(np.float32)
        picks = torch.from_numpy(np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int64))
        weights = torch.from_numpy(self.rng.uniform(0.1, 1.0, picks.shape).astype(np.float16))
        expected = self._in_place(layer, x, picks, weights) + _shared(x)
        offload.begin_layer(layer)
        offload.begin_router()
        offload.plan_layer(layer, own, picks, weights)

        shared: list[np.ndarray] = []

        def run_hits(taken: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(self._pointed(layer, x, picks, taken))

        launches = OwnLaunches(run_hits, lambda: shared.append(_shared(x)))
        offload.land_layer(layer, own, launches)
        total = self._pointed(layer, x, picks, weights) + sum(shared)
        ahead = offload.look_ahead.ahead_of(layer)
        self.num_kept_ahead += 0 if ahead is None else int(ahead.keeps.count)
        sums = torch.from_numpy(total.astype(np.float32))
        offload.combine(layer, sums)
        offload.end_layer(layer)
        error = np.linalg.norm(sums.numpy() - expected) / np.linalg.norm(expected)
        assert error < TOLERANCE, (layer, error)

    def prefill(
        self,
        tokens: int,
        *,
        is_more_waiting: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a chunk's layers, checking what each would compute for a few rows.

        between: called behind each layer.
        """
        offload = self.offload
        offload.begin_chunk(tokens)
        self.least_bytes = min(self.least_bytes, offload.store.num_bytes)
        offload.stage_chunk()
        for layer in range(LAYERS):
            offload.begin_layer(layer)
            x = self.rng.normal(size=(3, HIDDEN)).astype(np.float16)
            picks = torch.from_numpy(self.rng.permutation(EXPERTS)[: 3 * TOP_K].reshape(3, TOP_K))
            weights = torch.full(picks.shape, 0.25, dtype=torch.float16)
            expected = self._in_place(layer, x, picks, weights)
            found = self._pointed(layer, x, picks, weights)
            assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < TOLERANCE
            offload.combine(layer, torch.from_numpy(found))
            offload.end_layer(layer)
            between()
        offload.end_chunk(is_more_waiting)

    def check_slots(self) -> int:
        """Compare resident experts with home; gives how many."""
        resident = np.flatnonzero(self.offload.store.table.reshape(-1) >= 0).tolist()
        assert self.offload.store.verify(resident) == []
        return len(resident)

    def _in_place(self, layer: int, x: np.ndarray, picks: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
        return self._compute(self.arena.table(layer), x, picks, weights)

    def _pointed(self, layer: int, x: np.ndarray, picks: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
        tables = self.tables[layer]
        matrices = (tables.gate, tables.up, tables.down)
        return self._compute(pointed_table(self.arena, layer, matrices, tables.scales), x, picks, weights)

    def _compute(self, table: Any, x: np.ndarray, picks: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
        taken = weights.numpy().astype(np.float32)
        chosen = np.where(taken == 0, -1, picks.numpy()).astype(np.int32)
        found: np.ndarray = self.pool.experts(
            x.astype(np.float32), table, chosen, taken, LIMIT, Clamp.ACTIVATION
        )
        return found

    def _tables(self, layer: int) -> LayerTables:
        own = [self.arena.suh(layer, expert, Part.DOWN).ctypes.data for expert in range(EXPERTS)]
        scales = torch.tensor(own, dtype=torch.int64)
        gate, up, down = torch.zeros((3, EXPERTS), dtype=torch.int64)
        return LayerTables(gate, up, down, scales, scales.clone())


def _shared(x: np.ndarray) -> np.ndarray:
    return 0.5 * x.astype(np.float32)
