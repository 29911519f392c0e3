"""What an offload on a GPU is built on: the experts' home, the package's tables, the VRAM's division."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.gpu.launch import RouterWeights
from glm53srv.offload.elastic import LoanParams
from glm53srv.offload.vram_plan import VramPlan


@dataclass(frozen=True, slots=True)
class LayerTables:
    """A sparse layer's pointer tables in the package: int64 (experts,) each, on the device, never moved.

    gate, up, down: of the trellis. scales: of down's input scales; own_scales: a copy of it as it was loaded.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    scales: torch.Tensor
    own_scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What an offload is built on. arena: filled and registered; alias: its bytes on the device.

    tables: of the sparse layers. plan: division of the VRAM. loan: what a chunk's activations take. routers:
    of the sparse layers that may be guessed from the layer in front, None for the others; across: whether a
    latent attention stands between, for each; see look_ahead.py. is_split: layers may take two launches.
    """

    arena: ExpertArena
    alias: torch.Tensor
    tables: list[LayerTables]
    plan: VramPlan
    loan: LoanParams = field(default_factory=LoanParams)
    routers: list[RouterWeights | None] = field(default_factory=list)
    across: list[bool] = field(default_factory=list)
    is_split: bool = False
