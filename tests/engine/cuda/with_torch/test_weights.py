"""Where the loader's tensors come from: routed experts are the arena's bytes, all else is the files'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from glm53srv.engine.cuda.weights import ArenaTensors
from glm53srv.model.config import ModelConfig
from glm53srv.model.tensor_needs import layer_prefix
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.gpu.registered import host_tensor
from glm53srv.offload.device.layout import Part, sparse_layers


class Files:
    """A tensor collection that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def get_tensor(self, key: str, device: Any = None, *arguments: Any, **options: Any) -> str:
        self.asked.append((key, device, arguments, options))
        return f"file:{key}"

    def has_tensor(self, key: str) -> bool:
        return key == "there"


def make(arena: ExpertArena, config: ModelConfig, files: Files, counts: list[int]) -> ArenaTensors:
    alias = host_tensor(arena.region)
    return ArenaTensors(files, arena, alias, sparse_layers(config), lambda: counts.append(1))


@pytest.mark.parametrize("part", list(Part))
def test_a_routed_experts_trellis_is_the_arenas_own_memory(
    arena: ExpertArena, config: ModelConfig, part: Part
) -> None:
    files, counts = Files(), list[int]()
    tensors = make(arena, config, files, counts)
    name = part.name.lower()
    for sparse_layer, layer in enumerate(sparse_layers(config)):
        for expert in (0, 7, config.moe.num_experts - 1):
            key = f"{layer_prefix(layer)}.mlp.experts.{expert}.{name}_proj.trellis"
            found = tensors.get_tensor(key, "cuda:0", no_defer=True)
            assert found.dtype == torch.int16
            assert found.is_contiguous()
            assert found.data_ptr() == arena.address(sparse_layer, expert) + arena.layout.offset(part)
            np.testing.assert_array_equal(found.numpy(), arena.trellis(sparse_layer, expert, part))
    assert files.asked == []
    assert len(counts) == 3 * len(sparse_layers(config))


@pytest.mark.parametrize(
    "key",
    [
        "{sparse}.mlp.experts.3.gate_proj.suh",
        "{sparse}.mlp.experts.3.gate_proj.mul1",
        "{sparse}.mlp.shared_experts.gate_proj.trellis",
        "{sparse}.mlp.gate.weight",
        "{dense}.mlp.gate_proj.trellis",
        "{behind}.mlp.experts.3.gate_proj.trellis",
        "lm_head.trellis",
    ],
)
def test_everything_else_goes_to_the_files_with_all_arguments(
    arena: ExpertArena, config: ModelConfig, key: str
) -> None:
    files, counts = Files(), list[int]()
    name = key.format(
        sparse=layer_prefix(sparse_layers(config)[0]),
        dense=layer_prefix(0),
        behind=layer_prefix(config.num_layers),  # the layer for multi-token prediction has experts of its own
    )
    found = make(arena, config, files, counts).get_tensor(name, "cuda:0", True, float2half=True)
    assert found == f"file:{name}"
    assert files.asked == [(name, "cuda:0", (True,), {"float2half": True})]
    assert counts == [1]


def test_other_methods_are_those_of_the_files(arena: ExpertArena, config: ModelConfig) -> None:
    tensors = make(arena, config, Files(), [])
    assert tensors.has_tensor("there")
    assert not tensors.has_tensor("elsewhere")
    with pytest.raises(AttributeError):
        _ = tensors.no_such_method


def test_an_expert_that_is_not_there_is_an_error(arena: ExpertArena, config: ModelConfig) -> None:
    key = f"{layer_prefix(sparse_layers(config)[0])}.mlp.experts.{config.moe.num_experts}.up_proj.trellis"
    with pytest.raises(IndexError):
        make(arena, config, Files(), []).get_tensor(key)


def test_convolution_weights_are_narrowed_only_where_the_layers_are_compiled(
    arena: ExpertArena, config: ModelConfig
) -> None:
    class Tensors(Files):
        def get_tensor(self, key: str, device: Any = None, *arguments: Any, **options: Any) -> Any:
            return None if "absent" in key else torch.full((3, 1, 4), 0.1 if "layers.1." in key else 1.0)

    alias, layers = host_tensor(arena.region), sparse_layers(config)
    plain = ArenaTensors(Tensors(), arena, alias, layers)
    compiled = ArenaTensors(Tensors(), arena, alias, layers, compiles_kda=True)
    key = f"{layer_prefix(0)}.self_attn.conv1d.weight"
    assert plain.get_tensor(key).dtype == torch.float32
    assert compiled.get_tensor(key).dtype == torch.bfloat16
    assert compiled.get_tensor(f"{layer_prefix(0)}.self_attn.dt_bias").dtype == torch.float32
    odd = f"{layer_prefix(1)}.self_attn.conv1d.weight"  # 0.1 is no bf16 number
    assert compiled.get_tensor(odd).dtype == torch.float32
    assert compiled.get_tensor("absent.self_attn.conv1d.weight") is None
