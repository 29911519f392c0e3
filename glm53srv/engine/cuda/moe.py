"""A sparse layer of the package whose experts live in the offload: three seams, methods or attributes.

forward             begin_layer before the router, end_layer behind the experts        prefill
routing_fn          plan_layer behind the router: it may zero weights                  decode
cpu_split_combine   called behind the experts: the CPU's sum is added                  decode
"""

from __future__ import annotations

import importlib
from typing import Any

from glm53srv.offload.device.gpu.gpu_offload import GpuOffload, LayerTables


def stock_class() -> Any:
    """Give the package's class of sparse layers."""
    return importlib.import_module("exllamav3.modules.block_sparse_mlp").BlockSparseMLP


def make_offloaded_class(base: Any) -> type[Any]:
    """Derive the class; at run time, since its base is the package's."""

    class OffloadedMlp(base):  # type: ignore[misc]
        """Takes over an instance that has not loaded yet: see adopt."""

        def adopt(self, sparse_layer: int) -> None:
            """Become a layer of the offload; without one, experts are read where their tensors lie."""
            self.sparse_layer = sparse_layer
            self.offload: GpuOffload | None = None
            self._stock_routing: Any = self.routing_fn
            self.routing_fn: Any = self._plan_behind_router

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
            picks, weights = self._stock_routing(rows, config, z, params)
            if self.offload is not None:
                self.offload.plan_layer(self.sparse_layer, z, picks, weights)
            return picks, weights

    return OffloadedMlp


def adopt_sparse_layers(model: Any, stock: Any = None) -> list[Any]:
    """Make every sparse layer of an unloaded text model ours; gives them in order.

    The instance changes its class, which keeps the module lists that the model has built already. stock: the
    class of sparse layers, None for the package's.
    """
    stock = stock or stock_class()
    ours: Any = make_offloaded_class(stock)
    layers: list[Any] = []
    for module in model.modules:
        mlp = getattr(module, "mlp", None)
        if isinstance(mlp, stock):
            mlp.__class__ = ours
            mlp.adopt(len(layers))
            layers.append(mlp)
    return layers


def tables_of(layer: Any) -> LayerTables:
    """Give a loaded layer's pointer tables."""
    return LayerTables(
        layer.multi_gate.ptrs_trellis, layer.multi_up.ptrs_trellis, layer.multi_down.ptrs_trellis
    )
