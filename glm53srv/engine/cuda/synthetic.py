"""A model of the real dimensions that is in no file: random codes, drawn on the device and in the arena.

For measuring: the time of a step depends on shapes, places and routes, not on what the weights mean. Any bits
are valid EXL3 codes. The router's bias is spread by depth so that the popularity of experts has the published
skew (SKEW). What neighbouring tokens share beyond popularity is not in the weights: imposed_routes.py lets
traces pick in their place. Deterministic: every tensor's numbers depend on the seed and its name.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.engine.cuda.synthetic_plan import TensorSpec, synthetic_layout, tensor_specs
from glm53srv.model.checkpoint import MUL1_MULTIPLIER
from glm53srv.model.config import ModelConfig
from glm53srv.model.pack import draw_rule
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.offload.device.layout import Part, sparse_layers

SKEW = ((3, 0.016), (7, 0.037), (22, 0.062), (36, 0.068), (43, 0.065))
"""Model layer and spread of its router's bias. By simulation (sigmoid of N(0, 1) plus bias, top 8 of 288) the
spread at which the popularity has the published gini of that layer: .18, .37, .55, .60, .58 (0xSero's routing
statistics over 9,250 decode tokens)."""

FILL_BLOCK = 64 * 2**20 + 8192
"""Bytes of random words that repeat through the arena; no multiple of a record, so that experts differ."""


class SyntheticTensors:
    """Stands in for a model's tensor collection (config.stc); makes a tensor each time it is asked for.

    The trellis of routed experts is not here: ArenaTensors gives it. arena: filled by fill_arena.
    """

    def __init__(self, config: ModelConfig, arena: ExpertArena, device: torch.device, seed: int = 0) -> None:
        self._config = config
        self._arena = arena
        self._device = device
        self._seed = seed
        self._specs = dict(tensor_specs(config))
        self.tensor_file_map = dict.fromkeys(self._specs, "synthetic")

    def has_tensor(self, key: str) -> bool:
        return key in self._specs

    def has_tensor_group(self, key: str | list[str], subkeys: list[Any]) -> bool:
        if isinstance(key, list):
            return all(self.has_tensor_group(each, subkeys) for each in key)
        return all(
            f"{key}.{sub}" in self._specs
            if isinstance(sub, str)
            else any(f"{key}.{each}" in self._specs for each in sub)
            for sub in subkeys
        )

    def get_tensor(
        self,
        key: str,
        device: Any = None,
        optional: bool = False,
        allow_bf16: bool = False,
        float2half: bool = False,
        no_defer: bool = False,
        transpose: bool = False,
        pad_to: tuple[int, ...] | None = None,
        fidx: int | None = None,
    ) -> torch.Tensor | None:
        """Make a tensor with the conversions that the package's collection knows."""
        spec = self._specs.get(key)
        if spec is None:
            if optional:
                return None
            raise ValueError(f"the synthetic model has no tensor {key}")
        target = torch.device("cpu" if device is None else device)
        tensor = self._make(key, spec)
        if (tensor.dtype == torch.bfloat16 and not allow_bf16) or (
            tensor.dtype == torch.float32 and float2half
        ):
            tensor = tensor.half()
        if transpose and tensor.dim() > 1:
            tensor = tensor.T
        if pad_to is not None and tuple(tensor.shape) != tuple(pad_to):
            padded = torch.zeros(pad_to, dtype=tensor.dtype, device=tensor.device)
            padded[tuple(slice(0, size) for size in tensor.shape)].copy_(tensor)
            tensor = padded
        return tensor.to(target).contiguous()

    def begin_deferred_load(self, arena: bool = True) -> None:
        """Nothing is deferred."""

    def end_deferred_load(self) -> None:
        """Nothing was deferred."""

    def abort_deferred_load(self) -> None:
        """Nothing was deferred."""

    def release_arena(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing is open."""

    def _make(self, key: str, spec: TensorSpec) -> torch.Tensor:
        if spec.kind == "mul1":
            return torch.from_numpy(np.array(MUL1_MULTIPLIER, np.uint32).view(np.int32))
        if spec.kind == "trellis":
            words = torch.randint(
                -(2**15), 2**15, spec.shape, generator=self._generator(key), device=self._device
            )
            return words.to(torch.int16)
        if ".mlp.experts." in key:  # the CPU workers read these from the arena, so they are the same
            return torch.from_numpy(self._expert_scales(key).copy())
        if spec.kind in ("suh", "svh"):
            return self._signs(key, spec)
        rule = draw_rule(key, spec.shape)
        spread = rule.spread
        if key.endswith("e_score_correction_bias"):
            layer = int(key.split(".layers.")[1].split(".")[0])
            depths, spreads = ([pair[i] for pair in SKEW] for i in (0, 1))
            spread = float(np.interp(float(layer), depths, spreads))
        drawn = torch.randn(spec.shape, generator=self._generator(key), device=self._device)
        dtype = {"bf16": torch.bfloat16, "f2": torch.float16, "f4": torch.float32}[rule.dtype]
        made = (rule.mean + spread * drawn).to(dtype)
        # Stored in fp32 and bf16 by origin, as in the published model.
        return made.bfloat16().float() if key.endswith("conv1d.weight") else made

    def _signs(self, key: str, spec: TensorSpec) -> torch.Tensor:
        """Draw signs; those of the outputs carry the scale that keeps activations at their size."""
        signs = torch.randint(0, 2, spec.shape, generator=self._generator(key), device=self._device) * 2 - 1
        scale = 1.0
        if spec.kind == "svh":
            inputs = self._specs[key.removesuffix("svh") + "suh"].shape[0]
            scale = inputs**-0.5
        return (signs * scale).half()

    def _expert_scales(self, key: str) -> NDArray[np.float16]:
        head, _, name = key.rpartition(".")
        prefix, _, place = head.partition(".mlp.experts.")
        expert, _, projection = place.partition(".")
        layer = sparse_layers(self._config).index(int(prefix.rpartition(".")[2]))
        part = {"gate_proj": Part.GATE, "up_proj": Part.UP, "down_proj": Part.DOWN}[projection]
        scales = self._arena.svh if name == "svh" else self._arena.suh
        return scales(layer, int(expert), part)

    def _generator(self, key: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        # torch's generator of the CPU reads the lower 32 bits of a seed alone, so both go into them.
        generator.manual_seed(zlib.crc32(key.encode(), self._seed))
        return generator


def fill_arena(
    config: ModelConfig, options: ArenaOptions, num_threads: int = 8, seed: int = 0
) -> ExpertArena:
    """Map an arena for the model, fill it with random codes and scales, and pin it. Raises MachineError."""
    layout, geometry = synthetic_layout(config)
    arena = ExpertArena(layout, geometry, options)
    rng = np.random.Generator(np.random.PCG64(seed))
    block: NDArray[np.uint8] = rng.integers(0, 256, FILL_BLOCK, np.uint8)
    target = arena.region.array()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda begin: _copy_block(target, block, begin), range(0, len(target), len(block))))
    scales = np.where(rng.integers(0, 2, arena.scales.shape[1:], np.int8) > 0, 1.0, -1.0)
    for part in Part:
        scales[layout.scale_range(part, is_output=True)] *= layout.features(part)[0] ** -0.5
    arena.scales[:] = scales.astype(np.float16)
    options.pinning.pin(arena.region)
    return arena


def _copy_block(target: NDArray[np.uint8], block: NDArray[np.uint8], begin: int) -> None:
    end = min(begin + len(block), len(target))
    target[begin:end] = block[: end - begin]
