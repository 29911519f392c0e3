"""Sparse layers of the package become ours: in order, before they load, each seam at its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm53srv.engine.cuda.moe import SharedBeside, adopt_sparse_layers, router_of


class Stock:
    """The package's sparse layer as far as it is overridden, in its order: router, experts, combine."""

    def __init__(self, name: str, told: list[Any]) -> None:
        self.name = name
        self.told = told
        self.routing_fn = self.route

    def route(self, rows: int, config: Any, z: Any, params: dict[str, Any]) -> tuple[str, str]:
        self.told.append(("router", rows, config, z, params))
        return "picks", "weights"

    def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
        found = self.routing_fn(3, "config", x, params)
        self.told.append(("experts", found, out_dtype))
        sums = self.cpu_split_combine(Sums(), None, None, (1, 3, 8))
        return f"y of {self.name}", sums

    def cpu_split_combine(self, sums: Any, partial: Any, pending: Any, shape: Any) -> Any:
        raise AssertionError("the stock CPU split must not run")


class Sums:
    """A tensor of sums, float32 (1, 3, 8)."""

    shape = (1, 3, 8)

    def view(self, *shape: int) -> str:
        return f"sums viewed {shape}"


class Block:
    """A module with or without a feed-forward network and an attention."""

    def __init__(self, mlp: Any = None, attn: Any = None) -> None:
        self.mlp = mlp
        self.attn = attn


class Model:
    """What a text model has."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules


class Offload:
    """Notes the calls of a layer."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.is_decoding = False

    def begin_layer(self, layer: int) -> None:
        self.told.append(("begin", layer))

    def plan_layer(self, layer: int, x: Any, picks: Any, weights: Any) -> None:
        self.told.append(("plan", layer, x, picks, weights))

    def land_layer(self, layer: int, x: Any, run: Any, run_shared: Any) -> None:
        self.told.append(("land", layer, x))
        run_shared("the plan's event")
        if self.is_decoding:
            self.told.append(("sums", run("hits' weights")))

    def combine(self, layer: int, sums: Any) -> None:
        self.told.append(("combine", layer, sums))

    def end_layer(self, layer: int) -> None:
        self.told.append(("end", layer))


def test_sparse_layers_are_adopted_in_order_and_keep_their_identity() -> None:
    told: list[Any] = []
    first, second = Stock("first", told), Stock("second", told)
    model = Model([object(), Block(), Block(first), Block(object()), Block(second)])
    layers = adopt_sparse_layers(model, Stock)
    assert [layer is stock for layer, stock in zip(layers, (first, second), strict=True)] == [True, True]
    assert [layer.sparse_layer for layer in layers] == [0, 1]
    assert all(isinstance(layer, Stock) and type(layer) is not Stock for layer in layers)


class Attention:
    """An attention or recurrent layer."""

    def __init__(self, *, is_latent: bool) -> None:
        self.caps = {"kv_cache": True} if is_latent else {}


def test_a_layer_is_led_by_the_one_in_front_unless_a_graph_is_cut_elsewhere_than_at_its_attention() -> None:
    recurrent, latent = Attention(is_latent=False), Attention(is_latent=True)
    modules = [
        Block(Stock("first", []), recurrent),
        Block(Stock("behind it", []), recurrent),
        Block(Stock("behind a cut", []), latent),
        Block(Stock("behind that", []), recurrent),
        Block(object(), latent),
        Block(Stock("behind a dense block with a cut", []), recurrent),
        Block(object(), recurrent),
        Block(Stock("behind a dense block", []), recurrent),
    ]
    layers = adopt_sparse_layers(Model(modules), Stock)
    assert [layer.is_led for layer in layers] == [False, True, True, True, False, True]
    assert [layer.is_across for layer in layers] == [False, False, True, False, False, False]


class RoutingConfig:
    """What the package's router goes by, as far as a guess needs it."""

    def __init__(self, bias: torch.Tensor | None) -> None:
        self.gate_tensor = torch.ones((8, 3), dtype=torch.half)
        self.e_score_correction_bias = bias


@pytest.mark.parametrize("bias", [None, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3).half()])
def test_a_led_layers_router_is_its_gate_and_bias(bias: torch.Tensor | None) -> None:
    blocks = [Block(Stock(name, []), Attention(is_latent=False)) for name in "abc"]
    layers = adopt_sparse_layers(Model(blocks), Stock)
    for layer, kind in zip(layers, ("dots", "dots", "std"), strict=True):
        layer.routing_cfg, layer.router_type = RoutingConfig(bias), kind
    assert router_of(layers[0]) is None  # no layer leads it
    assert router_of(layers[2]) is None  # chooses otherwise
    found = router_of(layers[1])
    assert found is not None
    assert found.gate is layers[1].routing_cfg.gate_tensor
    assert found.bias.dtype == torch.float32
    assert found.bias.tolist() == ([0.0] * 3 if bias is None else bias.tolist())


def test_without_an_offload_a_layer_does_what_the_package_does() -> None:
    told: list[Any] = []
    (layer,) = adopt_sparse_layers(Model([Block(Stock("one", told))]), Stock)
    y, sums = layer.forward("x", {"a": 1}, "half")
    assert y == "y of one"
    assert isinstance(sums, Sums)
    assert told == [("router", 3, "config", "x", {"a": 1}), ("experts", ("picks", "weights"), "half")]


def test_the_seams_are_called_in_the_order_of_a_layer() -> None:
    told: list[Any] = []
    layers = adopt_sparse_layers(Model([Block(Stock(name, told)) for name in "ab"]), Stock)
    layers[1].offload = Offload(told)
    y, _ = layers[1].forward("x", {})
    assert y == "y of b"
    assert told == [
        ("begin", 1),
        ("router", 3, "config", "x", {}),
        ("plan", 1, "x", "picks", "weights"),
        ("land", 1, "x"),
        ("experts", ("picks", "weights"), None),
        ("combine", 1, "sums viewed (-1, 8)"),
        ("end", 1),
    ]


class Compiled:
    """The package's compiled path."""

    def __init__(self, told: list[Any], sums: torch.Tensor) -> None:
        self.told, self.sums = told, sums

    def run_bszN(self, x: Any, picks: Any, weights: Any) -> None:  # the package's name
        self.told.append(("compiled", x, picks, weights))
        self.sums[: len(x)] += 1


class Buffers:
    """The package's record of its buffers."""

    def __init__(self, out_bszn: torch.Tensor) -> None:
        self.out_bszn = out_bszn


def test_the_offload_may_run_a_part_of_the_experts_before_the_package_runs_the_others() -> None:
    told: list[Any] = []
    (layer,) = adopt_sparse_layers(Model([Block(Stock("one", told))]), Stock)
    layer.offload = Offload(told)
    layer.offload.is_decoding = True
    sums = torch.zeros(8, 4)
    layer.bc, layer.experts_cfg = Compiled(told, sums), Buffers(sums)
    layer.forward("two", {})  # a fake of three rows: its letters
    found = dict(each[:2] for each in told if each[0] == "sums")["sums"]
    assert found.tolist() == [[1.0] * 4] * 3
    assert [each[0] for each in told] == [
        *("begin", "router", "plan", "land", "compiled", "sums", "experts", "combine", "end")
    ]
    assert ("compiled", "two", "picks", "hits' weights") in told


@pytest.mark.parametrize("is_decoding", [True, False])
def test_the_shared_expert_begins_behind_the_plan_where_the_offload_says(is_decoding: bool) -> None:
    class Beside:
        def begin(self, x: Any, params: dict[str, Any], event: Any) -> None:
            told.append(("shared", x, params, event))

    told: list[Any] = []
    (layer,) = adopt_sparse_layers(Model([Block(Stock("one", told))]), Stock, side_stream="a stream")
    layer.offload = Offload(told)
    layer.offload.is_decoding = is_decoding
    layer.shared_experts = Beside()
    layer.bc, layer.experts_cfg = Compiled([], torch.zeros(1, 1)), Buffers(torch.zeros(1, 1))
    layer.forward("x", {"a": 1})
    names = [each[0] for each in told if each[0] != "sums"]
    shared = ["shared"] if is_decoding else []
    assert names == ["begin", "router", "plan", "land", *shared, "experts", "combine", "end"]
    assert not is_decoding or ("shared", "x", {"a": 1}, "the plan's event") in told


class LoadingStock(Stock):
    """Notes which shared expert it built its compiled path with."""

    def __init__(self, shared: Any) -> None:
        super().__init__("loading", [])
        self.shared_experts = shared

    def load_local(self, **options: Any) -> None:
        self.told.append((self.shared_experts, options))


class Shared:
    """A shared expert."""

    width = 5

    def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
        return ("shared of", x, out_dtype)


@pytest.mark.parametrize("is_beside", [True, False])
def test_the_compiled_path_is_built_without_a_shared_expert_that_runs_beside_it(is_beside: bool) -> None:
    shared = Shared()
    stock = LoadingStock(shared)
    (layer,) = adopt_sparse_layers(
        Model([Block(stock)]), LoadingStock, side_stream="a stream" if is_beside else None
    )
    layer.load_local(device="cuda:0")
    assert layer.told == [(None if is_beside else shared, {"device": "cuda:0"})]
    assert isinstance(layer.shared_experts, SharedBeside) == is_beside
    assert layer.shared_experts.width == 5
    assert layer.shared_experts.forward("x", {}, "half") == ("shared of", "x", "half")  # a prefill: no begin


def test_a_layer_that_fails_to_load_keeps_its_shared_expert() -> None:
    class Failing(LoadingStock):
        def load_local(self, **options: Any) -> None:
            raise RuntimeError("no room")

    shared = Shared()
    (layer,) = adopt_sparse_layers(Model([Block(Failing(shared))]), Failing, side_stream="a stream")
    with pytest.raises(RuntimeError, match="no room"):
        layer.load_local()
    assert layer.shared_experts.mlp is shared
