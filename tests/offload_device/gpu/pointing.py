"""What the expert kernels would read, from the pointer tables of a layer."""

from __future__ import annotations

import numpy as np
import torch

from glm53srv.exl3_matrix import ExpertTable
from glm53srv.offload.device.arena import ExpertArena


def pointed_table(
    arena: ExpertArena, layer: int, matrices: tuple[torch.Tensor, ...], scales: torch.Tensor
) -> ExpertTable:
    """Make a table for the CPU's kernels out of a layer's pointer tables, as far as they were written.

    matrices: int64 (experts,), of gate, up and down. scales: likewise, of down's input scales.
    """
    home = arena.address(layer, 0)
    own = home + np.arange(arena.geometry.num_experts, dtype=np.int64) * arena.layout.record_bytes
    gate, *others = (each.numpy() for each in matrices)
    written = gate != 0
    for table, offset in zip(others, arena.layout.offsets[1:], strict=True):
        np.testing.assert_array_equal(table[written], gate[written] + offset)
    records = np.where(written, gate, own).astype(np.uintp)
    pointed = arena.table(layer).moved(records, arena.layout.offsets)
    descriptor = pointed.descriptor.copy()
    descriptor["suh"][2::3] = scales.numpy()
    pointed.descriptor = descriptor
    return pointed
