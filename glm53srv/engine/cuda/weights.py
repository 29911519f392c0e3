"""Where exllamav3's loader gets its tensors: routed experts from the arena, all else from the files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from glm53srv.model.tensor_needs import layer_prefix
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.layout import Part

_EXPERT = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.trellis")
_CONVOLUTION = re.compile(r".*\.self_attn\.conv1d\.weight")
_PARTS = {"gate": Part.GATE, "up": Part.UP, "down": Part.DOWN}


class ArenaTensors:
    """Stands in for a model's tensor collection (config.stc), as the package's own wrappers do.

    A routed expert's trellis is an alias of its bytes in the arena, in the device's address space: nothing is
    read or allocated for it, and a kernel that follows it reads over the link. The arena must be filled,
    pinned, and outlive the model.
    """

    def __init__(
        self,
        files: Any,
        arena: ExpertArena,
        alias: Any,
        sparse_layers: tuple[int, ...],
        on_tensor: Callable[[], None] = lambda: None,
        *,
        compiles_kda: bool = False,
    ) -> None:
        """Wrap `files`. alias: uint8 (arena bytes,) on the device. on_tensor: called for each tensor.

        compiles_kda: give a KDA layer's convolution weights in bf16 where that loses nothing, as with the
        published model, whose weights are bf16 by origin. The package has a compiled decode path for a KDA
        layer, which takes them in bf16 only, and its converter stores them in fp32; without it some 35
        kernels a layer are launched one by one. Its sums differ in rounding.
        """
        self._files = files
        self._arena = arena
        self._alias = alias
        self._layers = {layer_prefix(layer): index for index, layer in enumerate(sparse_layers)}
        self._on_tensor = on_tensor
        self._compiles_kda = compiles_kda

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def get_tensor(self, key: str, device: Any = None, *arguments: Any, **options: Any) -> Any:
        """Give a tensor, as the package's collection does."""
        self._on_tensor()
        match = _EXPERT.fullmatch(key)
        if match is None or match[1] not in self._layers:
            found = self._files.get_tensor(key, device, *arguments, **options)
            if self._compiles_kda and found is not None and _CONVOLUTION.fullmatch(key):
                narrow = found.to(torch.bfloat16)
                return narrow if torch.equal(narrow.to(found.dtype), found) else found
            return found
        layout, part = self._arena.layout, _PARTS[match[3]]
        number = self._arena.key(self._layers[match[1]], int(match[2]))
        begin = number * layout.record_bytes + layout.offset(part)
        raw = self._alias[begin : begin + layout.num_bytes(part)]
        return raw.view(torch.int16).view(layout.shape(part))
