"""The model that is in no file: every name a loader asks for, the same numbers each time, the known skew."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm53srv.engine.cuda.synthetic import FILL_BLOCK, SKEW, SyntheticTensors, fill_arena
from glm53srv.engine.cuda.synthetic_plan import device_bytes, host_bytes, synthetic_layout, tensor_specs
from glm53srv.model.checkpoint import MUL1_MULTIPLIER, Checkpoint, LinearNeed
from glm53srv.model.config import MlpKind, ModelConfig
from glm53srv.model.published import PUBLISHED
from glm53srv.model.tensor_needs import all_needs, layer_prefix
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.offload.device.layout import Part, sparse_layers
from glm53srv.offload.device.region import Region

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drawn(config: ModelConfig) -> ExpertArena:
    return fill_arena(config, ArenaOptions(), 2)


@pytest.fixture(scope="module")
def tensors(config: ModelConfig, drawn: ExpertArena) -> SyntheticTensors:
    return SyntheticTensors(config, drawn, CPU)


def get(tensors: SyntheticTensors, key: str, **options: Any) -> torch.Tensor:
    found = tensors.get_tensor(key, **options)
    assert found is not None
    return found


def test_the_names_and_shapes_are_those_of_a_checkpoint(config: ModelConfig, random_model_dir: Path) -> None:
    specs = dict(tensor_specs(config))
    checkpoint = Checkpoint(random_model_dir)
    assert specs.keys() == set(checkpoint.names())
    for name, spec in specs.items():
        stored = checkpoint.info(name).shape
        if spec.kind == "trellis":  # the published checkpoint has other bits per weight than the random one
            assert spec.shape[:2] == stored[:2], name
        else:
            assert spec.shape == stored, name


def test_every_tensor_that_is_needed_is_made_in_its_shape(
    config: ModelConfig, tensors: SyntheticTensors
) -> None:
    specs = dict(tensor_specs(config))
    for need in all_needs(config):
        if isinstance(need, LinearNeed) and ".mlp.experts." in need.key and ".experts.0." not in need.key:
            continue  # one expert of each layer stands for all
        keys = [need.name] if not isinstance(need, LinearNeed) else list(_parts(need.key, specs))
        assert keys
        for key in keys:
            made = get(tensors, key, allow_bf16=True)
            assert tuple(made.shape) == specs[key].shape, key
            assert made.dtype.is_floating_point == (specs[key].kind not in ("trellis", "mul1")), key
            if made.dtype.is_floating_point:
                assert bool(torch.isfinite(made).all()), key


def _parts(key: str, specs: dict[str, Any]) -> list[str]:
    return [
        f"{key}.{part}" for part in ("trellis", "suh", "svh", "mul1", "weight") if f"{key}.{part}" in specs
    ]


def test_numbers_depend_on_seed_and_name_alone(
    config: ModelConfig, drawn: ExpertArena, tensors: SyntheticTensors
) -> None:
    again, other = SyntheticTensors(config, drawn, CPU), SyntheticTensors(config, drawn, CPU, seed=1)
    keys = [f"{layer_prefix(0)}.mlp.{name}_proj.trellis" for name in ("gate", "up")]
    last = get(again, keys[1])  # asked for in another order
    assert torch.equal(get(tensors, keys[0]), get(again, keys[0]))
    assert torch.equal(get(tensors, keys[1]), last)
    assert not torch.equal(get(tensors, keys[0]), last)
    assert not torch.equal(get(tensors, keys[0]), get(other, keys[0]))


def test_the_loaders_conversions(tensors: SyntheticTensors) -> None:
    norm, gate = f"{layer_prefix(0)}.input_layernorm.weight", f"{layer_prefix(1)}.mlp.gate.weight"
    bias = f"{layer_prefix(1)}.mlp.gate.e_score_correction_bias"
    assert get(tensors, norm, allow_bf16=True).dtype == torch.bfloat16
    assert get(tensors, norm).dtype == torch.float16
    assert get(tensors, bias).dtype == torch.float32
    assert get(tensors, bias, float2half=True).dtype == torch.float16
    turned = get(tensors, gate, transpose=True)
    assert torch.equal(turned, get(tensors, gate).T)
    assert turned.is_contiguous()
    rows, columns = get(tensors, gate).shape
    padded = get(tensors, gate, pad_to=(rows + 3, columns + 5))
    assert torch.equal(padded[:rows, :columns], get(tensors, gate))
    assert int(padded.count_nonzero()) == int(get(tensors, gate).count_nonzero())


def test_unknown_names_are_none_or_an_error(tensors: SyntheticTensors) -> None:
    assert tensors.get_tensor("no.such", optional=True) is None
    with pytest.raises(ValueError, match=r"has no tensor no\.such"):
        tensors.get_tensor("no.such")


def test_groups_of_tensors_are_found_as_the_loader_asks(tensors: SyntheticTensors) -> None:
    head, key = "lm_head", f"{layer_prefix(0)}.mlp.gate_proj"
    assert tensors.has_tensor_group(key, ["trellis", ["suh", "su"], ["svh", "sv"]])
    assert tensors.has_tensor_group([head, key], ["trellis"])
    assert not tensors.has_tensor_group([head, "no.such"], ["trellis"])
    assert not tensors.has_tensor_group(key, ["weight"])
    assert not tensors.has_tensor_group(key, [["sv", "bias"]])
    assert tensors.has_tensor(f"{key}.mul1")
    assert int(get(tensors, f"{key}.mul1").numpy().view(np.uint32)) == MUL1_MULTIPLIER


def test_experts_have_the_arenas_scales(
    config: ModelConfig, drawn: ExpertArena, tensors: SyntheticTensors
) -> None:
    layer = sparse_layers(config)[2]
    for part, inputs in ((Part.UP, config.hidden_size), (Part.DOWN, config.moe.expert_size)):
        key = f"{layer_prefix(layer)}.mlp.experts.5.{part.name.lower()}_proj"
        assert np.array_equal(get(tensors, f"{key}.suh").numpy(), drawn.suh(2, 5, part))
        outputs = get(tensors, f"{key}.svh")
        assert np.array_equal(outputs.numpy(), drawn.svh(2, 5, part))
        assert torch.equal(outputs.abs().unique(), torch.tensor([inputs**-0.5]).half())
        assert torch.equal(get(tensors, f"{key}.suh").unique(), torch.tensor([-1.0, 1.0]).half())


@pytest.mark.parametrize("layer", [3, 7, 15, 22, 36, 44])
def test_the_routers_bias_is_spread_as_its_depth_says(drawn: ExpertArena, layer: int) -> None:
    tensors = SyntheticTensors(PUBLISHED, drawn, CPU)
    bias = get(tensors, f"{layer_prefix(layer)}.mlp.gate.e_score_correction_bias")
    depths, spreads = ([pair[i] for pair in SKEW] for i in (0, 1))
    expected = float(np.interp(layer, depths, spreads))
    assert bias.shape == (288,)
    # A standard deviation of 288 draws is off by 1 / sqrt(2 * 288) = 4.2 %; four of those.
    assert float(bias.std()) == pytest.approx(expected, rel=0.17)
    assert abs(float(bias.mean())) < 4 * expected / 288**0.5


def test_products_keep_the_size_of_activations(tensors: SyntheticTensors, config: ModelConfig) -> None:
    """svh of a dense matrix is 1 / sqrt(inputs): codes of N(0, 1) times that give outputs of 1."""
    key = f"{layer_prefix(0)}.mlp.down_proj"
    assert float(get(tensors, f"{key}.svh").abs().max()) == pytest.approx(config.dense_size**-0.5, rel=1e-3)


def test_the_arena_is_filled_pinned_and_the_same_each_time(config: ModelConfig, drawn: ExpertArena) -> None:
    class Pinning:
        name = "noted"

        def __init__(self) -> None:
            self.regions: list[Region] = []

        def pin(self, region: Region) -> None:
            self.regions.append(region)

        def release(self) -> None:
            self.regions.clear()

    pinning = Pinning()
    again = fill_arena(config, ArenaOptions(pinning=pinning), 3)
    assert pinning.regions == [again.region]
    assert np.array_equal(again.records, drawn.records)
    assert np.array_equal(again.scales, drawn.scales)
    assert not np.array_equal(fill_arena(config, ArenaOptions(), 2, seed=1).records, drawn.records)


def test_no_two_experts_are_alike_where_the_random_words_repeat(config: ModelConfig) -> None:
    kinds = (MlpKind.DENSE,) * (config.num_layers - 2) + (MlpKind.SPARSE,) * 2
    moe = replace(config.moe, num_experts=288, expert_size=512)
    arena = fill_arena(replace(config, mlp_kinds=kinds, moe=moe), ArenaOptions(), 2)
    assert arena.region.num_bytes > FILL_BLOCK + arena.layout.record_bytes
    sums = {zlib.crc32(record.data) for record in arena.records}
    assert len(sums) == arena.geometry.num_keys == 576
    assert arena.records[-1].any()


def test_the_published_model_has_its_published_sizes() -> None:
    layout, geometry = synthetic_layout(PUBLISHED)
    assert (layout.record_bytes, geometry.num_keys) == (9_437_184, 12_096)
    assert host_bytes(PUBLISHED) > geometry.num_keys * layout.record_bytes
    # The published files hold 125.3 GB, 114.2 of them routed experts' trellis; the rest is about 7 of text,
    # and the vision tower and the layer for multi-token prediction, which are not read.
    assert 6e9 < device_bytes(PUBLISHED) < 9e9
