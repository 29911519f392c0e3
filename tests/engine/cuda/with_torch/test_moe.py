"""Sparse layers of the package become ours: in order, before they load, each seam at its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm53srv.engine.cuda.expert_launches import FIRST_PIECES
from glm53srv.engine.cuda.moe import adopt_sparse_layers, router_of
from tests.engine.cuda.with_torch.fake_experts import (
    HIDDEN,
    MAX_ROWS,
    NUM_SLOTS,
    TOP_K,
    FakeCompiled,
    FakeExtension,
    FakeLayer,
)


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

    def begin_router(self) -> None:
        self.told.append("router begins")

    def plan_layer(self, layer: int, x: Any, picks: Any, weights: Any) -> None:
        self.told.append(("plan", layer, x, picks, weights))

    def land_layer(self, layer: int, x: Any, own: Any) -> None:
        self.told.append(("land", layer, x))

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
        "router begins",
        ("router", 3, "config", "x", {}),
        ("plan", 1, "x", "picks", "weights"),
        ("land", 1, "x"),
        ("experts", ("picks", "weights"), None),
        ("combine", 1, "sums viewed (-1, 8)"),
        ("end", 1),
    ]


class CompiledStock(Stock):
    """A layer that runs its experts by the compiled path."""

    def __init__(self, name: str, told: list[Any]) -> None:
        super().__init__(name, told)
        self.layer = FakeLayer(SHARED_SEED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def load_local(self, **options: Any) -> None:
        self.bc = FakeCompiled(self.layer)

    def route(self, rows: int, config: Any, z: Any, params: dict[str, Any]) -> Any:
        return PICKS[: len(z)], WEIGHTS[: len(z)].clone()

    def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
        picks, weights = self.routing_fn(3, "config", x, params)
        self.bc.run_bszN(x, picks, weights)
        sums = self.layer.experts_cfg.out_bszn[: len(x)].clone()
        return self.cpu_split_combine(sums, None, None, None)


SHARED_SEED = 3
PICKS = torch.tensor([[0, 2, 5], [1, 2, 4], [3, 5, 0]])
WEIGHTS = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.5, 0.125], [0.25, 0.5, 0.5]]).half()


class SplittingOffload(Offload):
    """Says that experts 2 and 5 are in VRAM, which are to be computed before the others, if apart."""

    def __init__(self, told: list[Any], *, apart: bool) -> None:
        super().__init__(told)
        self.apart = apart
        self.early: torch.Tensor | None = None
        self.total: torch.Tensor | None = None

    def plan_layer(self, layer: int, x: Any, picks: Any, weights: Any) -> None:
        is_hit = (picks == 2) | (picks == 5)
        self.hit_weights = torch.where(is_hit, weights, 0)
        if self.is_decoding and self.apart:
            weights[is_hit] = 0

    def land_layer(self, layer: int, x: Any, own: Any) -> None:
        self.told.append(("own", own is not None))
        if own is not None and self.apart:
            self.early = own.hits(self.hit_weights).clone()
        if own is not None:
            own.shared()

    def combine(self, layer: int, sums: Any) -> None:
        self.total = sums.clone() if self.early is None else sums + self.early


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("is_decoding", "apart"), [(True, True), (True, False), (False, False)])
def test_launches_of_their_own_give_what_the_packages_call_does(
    rows: int, is_decoding: bool, apart: bool
) -> None:
    told: list[Any] = []
    stock = [CompiledStock(name, told) for name in "ab"]
    extension = FakeExtension()
    layers = adopt_sparse_layers(Model([Block(each) for each in stock]), CompiledStock, extension)
    x = torch.arange(rows * HIDDEN).reshape(rows, HIDDEN).half() / 64
    for layer in layers:
        layer.load_local()
        assert layer.has_launches
        layer.offload = SplittingOffload(told, apart=apart)
        layer.offload.is_decoding = is_decoding
        for _ in range(2):  # what was begun does not outlive its step
            told.clear()
            layer.forward(x, {})
            assert [each for each in told if isinstance(each, tuple) and each[0] == "own"] == [
                ("own", is_decoding)
            ]
            expected = layer.layer.whole(x, PICKS[:rows], WEIGHTS[:rows])
            torch.testing.assert_close(layer.offload.total, expected)
        assert layer.bc.num_runs == (0 if is_decoding else 2)


def test_what_comes_first_has_scratch_for_fewer_pieces_unless_there_are_many_rows() -> None:
    extension = FakeExtension()
    (layer,) = adopt_sparse_layers(Model([Block(CompiledStock("one", []))]), CompiledStock, extension)
    layer.load_local()
    layer.offload = SplittingOffload([], apart=True)
    layer.offload.is_decoding = True
    for rows, cuts, expected in (
        (1, True, FIRST_PIECES * TOP_K),
        (1, False, NUM_SLOTS),
        (2, True, FIRST_PIECES * TOP_K),
        (3, True, NUM_SLOTS),
    ):
        layer.maker.cuts_first_less = cuts
        extension.slots.clear()
        layer.forward(torch.ones((rows, HIDDEN)).half(), {})
        assert extension.slots == [expected, MAX_ROWS, NUM_SLOTS]  # those in VRAM, the shared one, the others


@pytest.mark.parametrize("extension", [None, "refused"])
def test_a_layer_without_launches_keeps_the_packages_call(extension: str | None) -> None:
    stock = CompiledStock("one", [])
    stock.layer.activation_fn = "silu" if extension is None else "gelu"
    (layer,) = adopt_sparse_layers(Model([Block(stock)]), CompiledStock, extension)
    layer.load_local()
    assert not layer.has_launches
    assert isinstance(layer.bc, FakeCompiled)
    layer.offload = SplittingOffload([], apart=False)
    layer.offload.is_decoding = True
    x = torch.ones((2, HIDDEN)).half()
    layer.forward(x, {})
    torch.testing.assert_close(layer.offload.total, layer.layer.whole(x, PICKS[:2], WEIGHTS[:2]))
    assert layer.offload.told == [("begin", 0), "router begins", ("own", False), ("end", 0)]
