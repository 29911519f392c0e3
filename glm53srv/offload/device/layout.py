"""How one expert lies in the arena and in a slot: its record.

    record   | gate trellis | up trellis | down trellis |     each part starts at a multiple of 256 bytes
    scales   | gate suh | up suh | down suh | gate svh | up svh | down svh |     float16

A record is the unit of every copy. The scales never move: the GPU keeps those of all experts (446 MB of 114
GB for GLM-5.3-Flash), the host another copy in one table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import prod

from glm53srv.errors import CheckpointError
from glm53srv.model.checkpoint import Checkpoint, CodebookName, LinearNeed
from glm53srv.model.config import MlpKind, ModelConfig
from glm53srv.model.tensor_needs import layer_prefix, mlp_needs
from glm53srv.offload.geometry import ExpertGeometry

BLOCK = 128
"""Width of a Hadamard block: the least part of an intermediate that can be computed alone."""

MAX_PARTS = 16
"""Parts that an expert is cut into at most, when two lanes share it; GLM-5.3-Flash has 16 blocks."""

ALIGNMENT = 256
"""Bytes; the GPU kernels need 16, a memory transaction takes 128, and copies like whole ones."""

TRELLIS_ITEM_BYTES = 2
SCALE_ITEM_BYTES = 2


class Part(enum.IntEnum):
    """A matrix of an expert, in the order of the record."""

    GATE = 0
    UP = 1
    DOWN = 2


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Shapes and places of one expert's parts, the same for all experts.

    hidden, intermediate: widths. words: int16 words per tile of gate, up and down. codebook: of all three.
    """

    hidden: int
    intermediate: int
    words: tuple[int, int, int]
    codebook: CodebookName

    @property
    def num_blocks(self) -> int:
        """Blocks of the intermediate."""
        return self.intermediate // BLOCK

    @property
    def num_parts(self) -> int:
        """Equal parts of whole blocks, at most MAX_PARTS, that the lanes may share an expert by; 1: none."""
        return max(parts for parts in range(1, MAX_PARTS + 1) if self.num_blocks % parts == 0)

    def features(self, part: Part) -> tuple[int, int]:
        """Give in and out features."""
        return (self.intermediate, self.hidden) if part is Part.DOWN else (self.hidden, self.intermediate)

    def shape(self, part: Part) -> tuple[int, int, int]:
        """Give the shape of the int16 trellis."""
        rows, columns = self.features(part)
        return rows // 16, columns // 16, self.words[part]

    def num_bytes(self, part: Part) -> int:
        """Give the size of the trellis."""
        return prod(self.shape(part)) * TRELLIS_ITEM_BYTES

    def offset(self, part: Part) -> int:
        """Give the place of the trellis within the record."""
        return sum(_aligned(self.num_bytes(earlier)) for earlier in Part if earlier < part)

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Places of gate, up and down within the record."""
        return self.offset(Part.GATE), self.offset(Part.UP), self.offset(Part.DOWN)

    @property
    def record_bytes(self) -> int:
        """Size of a record and of a slot."""
        return sum(_aligned(self.num_bytes(part)) for part in Part)

    def scale_range(self, part: Part, *, is_output: bool) -> slice:
        """Give the place of suh, or svh with is_output, in a row of the table of scales; in items."""
        sizes = [self.features(each)[0] for each in Part] + [self.features(each)[1] for each in Part]
        index = part + (len(Part) if is_output else 0)
        begin = sum(sizes[:index])
        return slice(begin, begin + sizes[index])

    @property
    def num_scales(self) -> int:
        """Items in a row of the table of scales."""
        return 3 * (self.hidden + self.intermediate)


def expert_needs(config: ModelConfig, sparse_layer: int, expert: int) -> tuple[LinearNeed, ...]:
    """Name the gate, up and down of an expert; sparse_layer counts from 0 whatever its place in the model."""
    layer = sparse_layers(config)[sparse_layer]
    prefix = f"{layer_prefix(layer)}.mlp.experts.{expert}"
    return tuple(mlp_needs(prefix, config.hidden_size, config.moe.expert_size))


def sparse_layers(config: ModelConfig) -> tuple[int, ...]:
    """List the layers with routed experts."""
    return tuple(i for i, kind in enumerate(config.mlp_kinds) if kind is MlpKind.SPARSE)


def plan_records(checkpoint: Checkpoint, config: ModelConfig) -> tuple[RecordLayout, ExpertGeometry]:
    """Find the one layout that all routed experts share, from the files' headers.

    Raises CheckpointError, naming the first expert that differs: slots of one size are what lets any expert
    take any slot.
    """
    layers = sparse_layers(config)
    if not layers:
        raise CheckpointError(f"{checkpoint.model_dir}: has no routed experts; leave --offload away")
    layout = None
    for index in range(len(layers)):
        for expert in range(config.moe.num_experts):
            found = _layout_of(checkpoint, config, expert_needs(config, index, expert))
            layout = layout or found
            if found != layout:
                raise CheckpointError(
                    f"{checkpoint.model_dir}: expert {expert} of layer {layers[index]} has "
                    f"{_describe(found)}, expert 0 of layer {layers[0]} has {_describe(layout)}; --offload "
                    "needs experts of one form, leave it away"
                )
    assert layout is not None
    geometry = ExpertGeometry(len(layers), config.moe.num_experts, config.moe.top_k, layout.record_bytes)
    return layout, geometry


def _layout_of(checkpoint: Checkpoint, config: ModelConfig, needs: tuple[LinearNeed, ...]) -> RecordLayout:
    stored = [checkpoint.quantized(need) for need in needs]
    for linear in stored:
        if linear.bias is not None:
            raise CheckpointError(f"{checkpoint.model_dir}: {linear.key}: has a bias, which --offload lacks")
        if linear.codebook is not stored[0].codebook:
            raise CheckpointError(
                f"{checkpoint.model_dir}: {linear.key}: has another codebook than its gate; leave --offload "
                "away"
            )
    gate, up, down = (int(linear.trellis.shape[2]) for linear in stored)
    return RecordLayout(config.hidden_size, config.moe.expert_size, (gate, up, down), stored[0].codebook)


def _describe(layout: RecordLayout) -> str:
    bits = "/".join(f"{words / 16:g}" for words in layout.words)
    return f"{bits} bits with codebook {layout.codebook.value}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
