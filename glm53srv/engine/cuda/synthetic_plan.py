"""What a model of random weights consists of, without torch: tensors by name, and the memory they take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from glm53srv.errors import MachineError
from glm53srv.machine import GIB, MachineFacts
from glm53srv.model.checkpoint import TILE, CodebookName, LinearNeed
from glm53srv.model.config import ModelConfig
from glm53srv.model.pack import QUANTIZED
from glm53srv.model.published import stored_bits
from glm53srv.model.tensor_needs import all_needs
from glm53srv.offload.device.arena import SPARE_BYTES
from glm53srv.offload.device.layout import SCALE_ITEM_BYTES, RecordLayout, sparse_layers
from glm53srv.offload.geometry import ExpertGeometry

_ITEM_BYTES = {"trellis": 2, "suh": 2, "svh": 2, "mul1": 4, "plain": 2}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor: its shape, and how it is made: trellis, suh, svh, mul1 or plain."""

    kind: str
    shape: tuple[int, ...]


def tensor_specs(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """List every tensor by name; bits per weight as in the published 3.05 bpw checkpoint."""
    for need in all_needs(config):
        if not isinstance(need, LinearNeed):
            yield need.name, TensorSpec("plain", need.shape)
        elif need.key.endswith(QUANTIZED):
            rows, columns = need.in_features, need.out_features
            words = TILE * quantized_bits(need.key)
            yield f"{need.key}.trellis", TensorSpec("trellis", (rows // TILE, columns // TILE, words))
            yield f"{need.key}.suh", TensorSpec("suh", (rows,))
            yield f"{need.key}.svh", TensorSpec("svh", (columns,))
            yield f"{need.key}.mul1", TensorSpec("mul1", ())
        else:
            yield f"{need.key}.weight", TensorSpec("plain", (need.out_features, need.in_features))


def quantized_bits(key: str) -> int:
    """Give the bits per weight of a quantised linear."""
    bits = stored_bits(key)
    assert bits is not None, key
    return bits


def synthetic_layout(config: ModelConfig) -> tuple[RecordLayout, ExpertGeometry]:
    """Give the records of the routed experts; raises ValueError for a model without."""
    moe = config.moe
    words = (TILE * quantized_bits(".mlp.experts."),) * 3
    layout = RecordLayout(config.hidden_size, moe.expert_size, words, CodebookName.MUL1)
    geometry = ExpertGeometry(len(sparse_layers(config)), moe.num_experts, moe.top_k, layout.record_bytes)
    return layout, geometry


def device_bytes(config: ModelConfig) -> int:
    """Give the bytes of everything but routed experts' trellis, as it will lie on the device."""
    return sum(
        _ITEM_BYTES[spec.kind] * math.prod(spec.shape)
        for name, spec in tensor_specs(config)
        if not (".mlp.experts." in name and spec.kind == "trellis")
    )


def host_bytes(config: ModelConfig) -> int:
    """Give the bytes that the model takes of host memory: arena, scales, and the table of embeddings."""
    layout, geometry = synthetic_layout(config)
    experts = geometry.num_keys * (layout.record_bytes + layout.num_scales * SCALE_ITEM_BYTES)
    return experts + 2 * config.vocab_size * config.hidden_size


def require_host_memory(config: ModelConfig, machine: MachineFacts) -> None:
    """Raise MachineError if the model does not fit; the line says how many layers would."""
    needed = host_bytes(config) + SPARE_BYTES
    if needed <= machine.usable_bytes:
        return
    layout, geometry = synthetic_layout(config)
    layer_bytes = geometry.num_experts * (layout.record_bytes + layout.num_scales * SCALE_ITEM_BYTES)
    too_many = -(-(needed - machine.usable_bytes) // layer_bytes)
    fitting = config.num_layers - too_many
    remedy = (
        f"--layers {fitting} fits, or free memory"
        if geometry.num_layers > too_many
        else "free memory, or take a machine with more"
    )
    raise MachineError(
        f"{config.num_layers} layers of random weights need {needed / GIB:.1f} GiB of host memory, "
        f"{machine.usable_bytes / GIB:.1f} are usable: {remedy}"
    )
