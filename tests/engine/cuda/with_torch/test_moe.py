"""Sparse layers of the package become ours: in order, before they load, each seam at its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from glm53srv.engine.cuda.moe import Extension, adopt_sparse_layers, router_of


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

    def land_layer(self, layer: int, x: Any, run: Any) -> bool:
        self.told.append(("land", layer, x))
        if self.is_decoding:
            self.told.append(("sums", run("hits' weights")))
        return self.is_decoding

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
    """The package's compiled path of a layer, and its extension: notes launches, adds 1 or 2 to sums."""

    def __init__(self, told: list[Any], sums: torch.Tensor) -> None:
        self.told, self.sums = told, sums
        self.other = "something else"

    def run_bszN(self, x: Any, picks: Any, weights: Any) -> None:
        self.told.append(("whole", x, picks, weights))
        self.sums[: len(x)] += 1

    def exl3_moe_coop(self, x: Any, picks: Any, weights: Any, *others: Any) -> None:
        self.told.append(("routed alone", x, picks, weights))
        self.arguments = others
        self.sums[: len(x)] += 2


@dataclass
class ExpertsConfig:
    """The package's record of its buffers: 16 slots, hidden width 256, intermediate 128."""

    out_bszn: torch.Tensor
    yh: torch.Tensor = field(default_factory=lambda: torch.zeros((16, 1, 256), dtype=torch.half))
    interm_g: torch.Tensor = field(default_factory=lambda: torch.zeros((16, 1, 128)))
    interm_u: torch.Tensor = field(default_factory=lambda: torch.zeros((16, 1, 128)))
    interm_a: torch.Tensor = field(default_factory=lambda: torch.zeros((16, 1, 128)))
    out_d: torch.Tensor = field(default_factory=lambda: torch.zeros((16, 1, 256)))
    min_expert: int = -1
    max_expert: int = -1


@dataclass
class Linears:
    """The package's record of one matrix of all experts."""

    name: str
    K: int = 3
    mcg: bool = False
    mul1: bool = True

    def __getattr__(self, attribute: str) -> str:
        return f"{self.name} {attribute}"


class CompiledStock(Stock):
    """A layer that runs its experts by the compiled path."""

    support_quant_paths, gated, activation_fn, bc_sh_exp, act_limit = True, True, "silu", True, 10.0
    bc: Any = None

    def load_local(self, **options: Any) -> None:
        sums = torch.zeros(8, 256)
        self.bc, self.experts_cfg = Compiled(self.told, sums), ExpertsConfig(sums)
        self.multi_gate, self.multi_up, self.multi_down = map(Linears, ("gate", "up", "down"))

    def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
        picks, weights = self.routing_fn(3, "config", x, params)
        self.bc.run_bszN(x, picks, weights)
        return self.cpu_split_combine(Sums(), None, None, (1, 3, 8))


@pytest.mark.parametrize("is_decoding", [True, False])
def test_in_fast_mode_the_experts_that_travelled_are_a_launch_of_their_own(is_decoding: bool) -> None:
    told: list[Any] = []
    compiled = Compiled(told, torch.zeros(8, 256))
    extension = Extension(compiled)
    layers = adopt_sparse_layers(
        Model([Block(CompiledStock(name, told)) for name in "ab"]), CompiledStock, extension
    )
    for layer in layers:
        layer.load_local()
        assert layer.is_split
        layer.offload = Offload(told)
        layer.offload.is_decoding = is_decoding
    assert layers[0].bc.other == "something else"
    for _ in range(2):  # the mark of a second launch does not outlive it
        told.clear()
        layers[0].forward("two", {})  # a fake of three rows: its letters
        launches = [each for each in told if each[0] in ("whole", "routed alone")]
        if is_decoding:
            assert launches == [
                ("whole", "two", "picks", "hits' weights"),
                ("routed alone", "two", "picks", "weights"),
            ]
        else:
            assert launches == [("whole", "two", "picks", "weights")]
    found = [each[1] for each in told if each[0] == "sums"]
    assert [each[:, 0].tolist() for each in found] == ([[2.0] * 3] if is_decoding else [])
    if is_decoding:
        config = layers[0].experts_cfg
        experts, hidden, *tables = compiled.arguments[1:12]
        assert (experts, hidden) == (-1, 256)
        kinds = ("ptrs_trellis", "ptrs_suh", "ptrs_svh")
        assert tables == [f"{name} {kind}" for name in ("gate", "up", "down") for kind in kinds]
        assert compiled.arguments[12:23] == (None, None, None, 3, 3, 3, False, True, 0, 10.0, True)[-11:]
        counters = compiled.arguments[-4]
        assert counters.shape == (16 * (1 + 2) + 8 * 2 + 3,)
        assert compiled.arguments[-3] is config.out_bszn
        assert compiled.arguments[-2:] == (None, None)
        layers[1].forward("two", {})
        assert compiled.arguments[-4] is counters  # scratch is shared


@pytest.mark.parametrize(
    ("name", "value"),
    [("support_quant_paths", False), ("gated", False), ("activation_fn", "gelu"), ("bc_sh_exp", False)],
)
def test_a_layer_of_another_kind_keeps_its_one_launch(name: str, value: Any) -> None:
    stock = CompiledStock("one", [])
    setattr(stock, name, value)
    (layer,) = adopt_sparse_layers(Model([Block(stock)]), CompiledStock, Extension(None))
    layer.load_local()
    assert not layer.is_split
    assert isinstance(layer.bc, Compiled)


def test_in_exact_mode_a_layer_keeps_its_one_launch() -> None:
    (layer,) = adopt_sparse_layers(Model([Block(CompiledStock("one", []))]), CompiledStock)
    layer.load_local()
    assert not layer.is_split
    assert isinstance(layer.bc, Compiled)
