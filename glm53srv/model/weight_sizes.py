"""How large the weights of a model are, by where a GPU server keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from glm53srv.errors import CheckpointError
from glm53srv.model.checkpoint import Checkpoint, LinearNeed, TensorNeed
from glm53srv.model.config import MlpKind, ModelConfig
from glm53srv.model.published import PUBLISHED, stored_bits, stored_item_bytes
from glm53srv.model.tensor_needs import EMBEDDING, all_needs

_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of the text model's weights.

    expert: the three trellis of one routed expert. expert_scales: suh and svh of all routed experts.
    embedding: stays in host memory. other: everything else.
    """

    expert: int
    expert_scales: int
    embedding: int
    other: int


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """A linear in bytes: its trellis (or its plain weight), and its scales."""

    matrix: int
    scales: int


def checkpoint_sizes(model: ModelConfig, checkpoint: Checkpoint) -> WeightSizes:
    """Add up what the files hold; the checkpoint must have passed check().

    Raises CheckpointError for experts of different sizes: slots have one size.
    """

    def linear_bytes(need: LinearNeed) -> LinearBytes:
        def size(*parts: str) -> int:
            names = (f"{need.key}.{part}" for part in parts)
            return sum(checkpoint.info(name).num_bytes for name in names if name in checkpoint)

        return LinearBytes(size("trellis", "weight"), size("suh", "svh", "su", "sv", "bias"))

    return _add_up(all_needs(model), model, lambda need: checkpoint.info(need.name).num_bytes, linear_bytes)


def published_sizes() -> WeightSizes:
    """Compute the sizes of the published checkpoint from its dimensions."""

    def tensor_bytes(need: TensorNeed) -> int:
        return prod(need.shape) * stored_item_bytes(need.name)

    def linear_bytes(need: LinearNeed) -> LinearBytes:
        values = need.in_features * need.out_features
        bits = stored_bits(need.key)
        if bits is None:
            return LinearBytes(2 * values, 0)
        return LinearBytes(values * bits // 8, 2 * (need.in_features + need.out_features))

    return _add_up(all_needs(PUBLISHED), PUBLISHED, tensor_bytes, linear_bytes)


def _add_up(
    needs: Iterable[TensorNeed | LinearNeed],
    model: ModelConfig,
    tensor_bytes: Callable[[TensorNeed], int],
    linear_bytes: Callable[[LinearNeed], LinearBytes],
) -> WeightSizes:
    embedding = other = scales = 0
    experts: dict[str, int] = {}
    for need in needs:
        if isinstance(need, TensorNeed):
            if need.name == EMBEDDING:
                embedding += tensor_bytes(need)
            else:
                other += tensor_bytes(need)
            continue
        size = linear_bytes(need)
        if _EXPERTS in need.key:
            expert = need.key.rpartition(".")[0]
            experts[expert] = experts.get(expert, 0) + size.matrix
            scales += size.scales
        else:
            other += size.matrix + size.scales
    sizes = set(experts.values())
    if len(sizes) > 1:
        raise CheckpointError(
            f"routed experts have {len(sizes)} different sizes, {min(sizes)} to {max(sizes)} bytes; a cache "
            "of equal slots needs experts of one size"
        )
    num_experts = model.mlp_kinds.count(MlpKind.SPARSE) * model.moe.num_experts
    if len(experts) != num_experts:
        raise CheckpointError(f"{len(experts)} routed experts were found, config.json asks for {num_experts}")
    return WeightSizes(sizes.pop() if sizes else 0, scales, embedding, other)
