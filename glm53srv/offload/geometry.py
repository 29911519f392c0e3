"""Sizes of the expert store, and the one way (layer, expert) pairs are numbered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """Routed experts of a model. `key` = layer * num_experts + expert numbers them all.

    num_layers: sparse layers, counted from 0 whatever their place in the model. expert_bytes: one expert's
    home copy, gate|up|down trellis, also the size of a slot.
    """

    num_layers: int = 42
    num_experts: int = 288
    top_k: int = 8
    expert_bytes: int = (
        9_437_184  # 3 * 4096 * 2048 weights of 3 bits (checkpoint config of GLM-5.3-Flash, 3.05 bpw)
    )

    def __post_init__(self) -> None:
        """Check the sizes. Raises ValueError."""
        if self.num_layers < 1 or not 1 <= self.top_k <= self.num_experts or self.expert_bytes < 1:
            raise ValueError(f"impossible expert geometry: {self}")

    @property
    def num_keys(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts
