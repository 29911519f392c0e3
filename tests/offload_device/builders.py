"""Experts of any shape, which no checkpoint has."""

from __future__ import annotations

import numpy as np

from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.offload.device.layout import RecordLayout
from glm53srv.offload.geometry import ExpertGeometry


def random_arena(layout: RecordLayout, num_layers: int, num_experts: int, top_k: int) -> ExpertArena:
    """Fill an arena with random bits: any are weights, of a standard deviation of about 1."""
    geometry = ExpertGeometry(num_layers, num_experts, top_k, layout.record_bytes)
    made = ExpertArena(layout, geometry, ArenaOptions())
    rng = np.random.default_rng(0)
    made.records[:] = rng.integers(0, 256, made.records.shape, np.uint8)
    made.scales[:] = rng.uniform(0.02, 0.1, made.scales.shape) * rng.choice([-1, 1], made.scales.shape)
    return made
