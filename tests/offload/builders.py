"""Small machines, pools and traces for the offload tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.copy_budget import CopyBudget, CopyBudgetParams
from glm53srv.offload.cost import CostModel, cpu_count_table
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.simulate.device import SimulatedDevice
from glm53srv.offload.simulate.profile import RTX3090_ONE_COPY, HardwareProfile
from glm53srv.offload.simulate.replay import OffloadReplay
from glm53srv.offload.simulate.timing import StepTimer

SMALL = ExpertGeometry(num_layers=4, num_experts=24, top_k=4, expert_bytes=1_000_000)
COSTS = CostModel(cpu_fixed_ms=0.11, cpu_expert_ms=0.104, zero_copy_ms=0.40, vram_expert_ms=0.034)
RECORD_BYTES = 48


def home_bytes(geometry: ExpertGeometry = SMALL) -> NDArray[np.uint8]:
    """Distinct stand-ins for the experts' bytes: uint8 (num_keys, RECORD_BYTES)."""
    return np.random.default_rng(5).integers(0, 256, (geometry.num_keys, RECORD_BYTES), np.uint8)


def profile(copy_gb_s: float = 1.0) -> HardwareProfile:
    """A machine whose copy engine moves one small expert per millisecond and GB/s."""
    changes = {"fixed_ms": {1: 1.0, 2: 1.0, 4: 1.0}, "copy_gb_s": copy_gb_s, "link_gb_s": 25.0}
    return RTX3090_ONE_COPY.amended("test", "test", changes)


def random_picks(
    rng: np.random.Generator, num_rows: int = 1, geometry: ExpertGeometry = SMALL, skew: float = 1.2
) -> NDArray[np.int32]:
    """Picks of one step: int32 (layers, num_rows * top_k), distinct within a row, low experts popular."""
    weight = 1.0 / np.arange(1, geometry.num_experts + 1) ** skew
    weight /= weight.sum()
    rows = [
        [rng.choice(geometry.num_experts, geometry.top_k, replace=False, p=weight) for _ in range(num_rows)]
        for _ in range(geometry.num_layers)
    ]
    return np.array(rows, np.int32).reshape(geometry.num_layers, -1)


def build_replay(
    num_slots: int = 32, params: ResidencyParams | None = None, copy_gb_s: float = 1.0, num_rows: int = 1
) -> OffloadReplay:
    """A policy and a device with bytes, driven together; a generous copy budget."""
    policy = ResidencyPolicy(SMALL, num_slots, params)
    timer = StepTimer(profile(copy_gb_s), SMALL.expert_bytes)
    device = SimulatedDevice(SMALL, num_slots, timer, home_bytes())
    budget = CopyBudget(CopyBudgetParams(link_share=1.0, copy_ms=0.5))
    return OffloadReplay(policy, device, budget, cpu_count_table(COSTS, num_rows * SMALL.top_k, "fast"))
