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
    ) -> None:
        """Wrap `files`. alias: uint8 (arena bytes,) on the device. on_tensor: called for each tensor."""
        self._files = files
        self._arena = arena
        self._alias = alias
        self._layers = {layer_prefix(layer): index for index, layer in enumerate(sparse_layers)}
        self._on_tensor = on_tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def get_tensor(self, key: str, device: Any = None, *arguments: Any, **options: Any) -> Any:
        """Give a tensor, as the package's collection does."""
        self._on_tensor()
        match = _EXPERT.fullmatch(key)
        if match is None or match[1] not in self._layers:
            return self._files.get_tensor(key, device, *arguments, **options)
        layout, part = self._arena.layout, _PARTS[match[3]]
        number = self._arena.key(self._layers[match[1]], int(match[2]))
        begin = number * layout.record_bytes + layout.offset(part)
        raw = self._alias[begin : begin + layout.num_bytes(part)]
        return raw.view(torch.int16).view(layout.shape(part))
