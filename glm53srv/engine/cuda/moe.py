"""A sparse layer of the package whose experts live in the offload: three seams, methods or attributes.

forward             begin_layer before the router, end_layer behind the experts        prefill
routing_fn          begin_router; plan_layer behind it: may zero weights; land_layer   decode
cpu_split_combine   called behind the experts: what others computed is added           decode

In a decode layer the shared expert runs beside the copies on which routed ones wait, and in fast mode those
in VRAM do, too: expert_launches.py. The package's own call for all of them goes through ByLaunches, which
enqueues what is left.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from glm53srv.engine.cuda.expert_launches import ExpertLaunches, LaunchMaker
from glm53srv.engine.cuda.graphs import is_latent_attention
from glm53srv.offload.device.gpu.gpu_memory import LayerTables
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.offload.device.gpu.landing_order import OwnLaunches
from glm53srv.offload.device.gpu.launch import RouterWeights


def stock_class() -> Any:
    """Give the package's class of sparse layers."""
    return importlib.import_module("exllamav3.modules.block_sparse_mlp").BlockSparseMLP


class ByLaunches:
    """Stands for a layer's compiled path. is_begun: the shared expert was launched, and perhaps others; the
    next run is for what is left."""

    def __init__(self, compiled: Any, launches: ExpertLaunches) -> None:
        self.launches = launches
        self.is_begun = False
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def run_bszN(self, x: Any, picks: Any, weights: Any) -> None:
        """Run a layer's experts: all of them, or those that are left."""
        is_begun, self.is_begun = self.is_begun, False
        if is_begun:
            self.launches.last(x, picks, weights)
        else:
            self._compiled.run_bszN(x, picks, weights)


def make_offloaded_class(base: Any) -> type[Any]:
    """Derive the class; at run time, since its base is the package's."""

    class OffloadedMlp(base):  # type: ignore[misc]
        """Takes over an instance that has not loaded yet: see adopt."""

        def adopt(
            self,
            sparse_layer: int,
            maker: LaunchMaker | None = None,
            *,
            is_led: bool = False,
            is_across: bool = False,
        ) -> None:
            """Become a layer of the offload; without one, experts are read where their tensors lie.

            maker: of launches of its own, None for the package's call alone. is_led: it follows another
            sparse layer, with no latent attention between or with that of its own block: is_across.
            """
            self.sparse_layer = sparse_layer
            self.is_led = is_led
            self.is_across = is_across
            self.has_launches = False  # once it is loaded
            self.offload: GpuOffload | None = None
            self.maker = maker
            self._stock_routing: Any = self.routing_fn
            self.routing_fn: Any = self._plan_behind_router

        def change_routing(self, wrap: Any) -> None:
            """Replace the router by wrap(router); for measurements. Before the first step."""
            self._stock_routing = wrap(self._stock_routing)

        def load_local(self, **options: Any) -> None:
            """Build the compiled path, and the launches beside it."""
            super().load_local(**options)
            launches = None if self.maker is None else self.maker.make(self)
            self.has_launches = launches is not None
            if launches is not None:
                self.bc: Any = ByLaunches(self.bc, launches)

        def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
            offload = self.offload
            if offload is None:
                return super().forward(x, params, out_dtype)
            offload.begin_layer(self.sparse_layer)
            y = super().forward(x, params, out_dtype)
            offload.end_layer(self.sparse_layer)
            return y

        def cpu_split_combine(self, sums: Any, partial: Any, pending: Any, shape: Any) -> Any:
            if self.offload is not None:
                self.offload.combine(self.sparse_layer, sums.view(-1, sums.shape[-1]))
            return sums

        def _plan_behind_router(self, rows: int, config: Any, z: Any, params: dict[str, Any]) -> Any:
            if self.offload is not None:
                self.offload.begin_router()
            picks, weights = self._stock_routing(rows, config, z, params)
            if self.offload is not None:
                self.offload.plan_layer(self.sparse_layer, z, picks, weights)
                own = None
                if self.has_launches and self.offload.is_decoding:
                    launches = self.bc.launches
                    own = OwnLaunches(
                        lambda taken: launches.first(z, picks, taken),
                        lambda: launches.shared(z),
                    )
                    self.bc.is_begun = True
                self.offload.land_layer(self.sparse_layer, z, own)
            return picks, weights

    return OffloadedMlp


def adopt_sparse_layers(model: Any, stock: Any = None, extension: Any = None) -> list[Any]:
    """Make every sparse layer of an unloaded text model ours; gives them in order.

    The instance changes its class, which keeps the module lists that the model has built already. stock: the
    class of sparse layers, None for the package's. extension: its compiled part, for launches of their own.
    """
    stock = stock or stock_class()
    ours: Any = make_offloaded_class(stock)
    layers: list[Any] = []
    maker = None if extension is None else LaunchMaker(extension)
    num_cuts = 0  # latent attentions since the last sparse layer
    for module in model.modules:
        attention, mlp = (getattr(module, name, None) for name in ("attn", "mlp"))
        is_cut = attention is not None and is_latent_attention(attention)
        num_cuts += is_cut
        if isinstance(mlp, stock):
            mlp.__class__ = ours
            is_led = bool(layers) and (num_cuts == 0 or (num_cuts == 1 and is_cut))
            mlp.adopt(len(layers), maker, is_led=is_led, is_across=is_led and is_cut)
            layers.append(mlp)
            num_cuts = 0
    return layers


def tables_of(layer: Any) -> LayerTables:
    """Give a loaded layer's pointer tables."""
    scales = layer.multi_down.ptrs_suh
    return LayerTables(
        layer.multi_gate.ptrs_trellis,
        layer.multi_up.ptrs_trellis,
        layer.multi_down.ptrs_trellis,
        scales,
        scales.clone(),
    )


def router_of(layer: Any) -> RouterWeights | None:
    """Give a loaded layer's router for guesses; None where they cannot be made.

    That is where the layer follows no other closely enough, and where its router chooses otherwise than by
    sigmoid plus bias ("dots" to the package), which no published GLM-5.3 does.
    """
    if not layer.is_led or layer.router_type != "dots":
        return None
    config = layer.routing_cfg
    gate, bias = config.gate_tensor, config.e_score_correction_bias
    if bias is None:
        return RouterWeights(gate, torch.zeros(gate.shape[1], dtype=torch.float32, device=gate.device))
    return RouterWeights(gate, bias.float())
