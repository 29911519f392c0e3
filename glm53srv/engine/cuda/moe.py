"""A sparse layer of the package whose experts live in the offload: three seams, methods or attributes.

forward             begin_layer before the router, end_layer behind the experts        prefill
routing_fn          plan_layer behind the router: it may zero weights; land_layer      decode
cpu_split_combine   called behind the experts: what others computed is added           decode

In fast mode a decode layer's experts are computed by two launches, see land_layer: the shared expert and
those in VRAM while the others travel, then the others. The package's own call is the second one; it goes
through TwoLaunches, which leaves the shared expert out of it. None of these kernels is a cooperative one, as
the package's product for a shared expert by itself is: such a one waits until no copy is left on the card,
and what is enqueued behind it waits, too (H200, traced, 2026-11-30).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from glm53srv.engine.cuda.graphs import is_latent_attention
from glm53srv.offload.device.gpu.gpu_memory import LayerTables
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.offload.device.gpu.launch import RouterWeights

SILU = 0
"""The package's number of an activation."""


def stock_class() -> Any:
    """Give the package's class of sparse layers."""
    return importlib.import_module("exllamav3.modules.block_sparse_mlp").BlockSparseMLP


class TwoLaunches:
    """Stands for a layer's compiled path. is_second: its next run is that of the experts that travelled."""

    def __init__(self, compiled: Any, run_others: Callable[[Any, Any, Any], None]) -> None:
        self.compiled = compiled
        self.is_second = False
        self._run_others = run_others

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def run_bszN(self, x: Any, picks: Any, weights: Any) -> None:
        """Run a layer's experts, the shared one among them if this is the only launch."""
        is_second, self.is_second = self.is_second, False
        (self._run_others if is_second else self.compiled.run_bszN)(x, picks, weights)


class Extension:
    """The package's compiled part, and scratch of its kernels that layers share, since none runs beside
    another; zeroed when it is made."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self._scratch: dict[tuple[Any, ...], torch.Tensor] = {}

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Give a tensor, the same for the same arguments."""
        key = (shape, dtype, device)
        if key not in self._scratch:
            self._scratch[key] = torch.zeros(shape, dtype=dtype, device=device)
        return self._scratch[key]


def make_launch(layer: Any, extension: Extension) -> Callable[[Any, Any, Any], None] | None:
    """Give the decode kernel over a loaded layer's routed experts alone, with the arguments and the scratch
    of its compiled path; None for a layer that it would not be the same for."""
    if not (layer.support_quant_paths and layer.gated and layer.activation_fn == "silu" and layer.bc_sh_exp):
        return None
    config, gate, up, down = layer.experts_cfg, layer.multi_gate, layer.multi_up, layer.multi_down
    num_slots, _, hidden = config.yh.shape
    chunks = config.interm_u.shape[-1] // 128, config.out_d.shape[-1] // 128
    num_counters = num_slots * (chunks[0] + 2) + len(config.out_bszn) * chunks[1] + 3
    counters = extension.scratch((num_counters,), torch.int32, config.yh.device)
    had_up = extension.scratch((num_slots, hidden), torch.float16, config.yh.device)
    tables = [
        getattr(each, name) for each in (gate, up, down) for name in ("ptrs_trellis", "ptrs_suh", "ptrs_svh")
    ]

    def launch(x: Any, picks: Any, weights: Any) -> None:
        extension.compiled.exl3_moe_coop(
            x,
            picks,
            weights,
            config.min_expert,
            config.max_expert,
            hidden,
            *tables,
            None,  # biases of gate, up, down
            None,
            None,
            gate.K,
            up.K,
            down.K,
            up.mcg,
            up.mul1,
            SILU,
            layer.act_limit,
            True,
            config.yh,
            had_up,
            config.interm_g,
            config.interm_u,
            config.interm_a,
            config.out_d,
            counters,
            config.out_bszn,
            None,  # the shared expert's sum and gate
            None,
        )

    return launch


def make_offloaded_class(base: Any) -> type[Any]:
    """Derive the class; at run time, since its base is the package's."""

    class OffloadedMlp(base):  # type: ignore[misc]
        """Takes over an instance that has not loaded yet: see adopt."""

        def adopt(
            self,
            sparse_layer: int,
            extension: Extension | None = None,
            *,
            is_led: bool = False,
            is_across: bool = False,
        ) -> None:
            """Become a layer of the offload; without one, experts are read where their tensors lie.

            extension: for layers of two launches, None for one. is_led: it follows another sparse layer, with
            no latent attention between or with that of its own block: is_across.
            """
            self.sparse_layer = sparse_layer
            self.is_led = is_led
            self.is_across = is_across
            self.is_split = False  # may take two launches, once it is loaded
            self.offload: GpuOffload | None = None
            self._extension = extension
            self._stock_routing: Any = self.routing_fn
            self.routing_fn: Any = self._plan_behind_router

        def change_routing(self, wrap: Any) -> None:
            """Replace the router by wrap(router); for measurements. Before the first step."""
            self._stock_routing = wrap(self._stock_routing)

        def load_local(self, **options: Any) -> None:
            """Build the compiled path, and the second launch beside it."""
            super().load_local(**options)
            launch = None if self._extension is None else make_launch(self, self._extension)
            self.is_split = launch is not None
            if launch is not None:
                self.bc: Any = TwoLaunches(self.bc, launch)

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

                def run_first(own: Any) -> Any:
                    self.bc.compiled.run_bszN(z, picks, own)
                    return self.experts_cfg.out_bszn[: len(z)]

                if self.offload.land_layer(self.sparse_layer, z, run_first):
                    self.bc.is_second = True
            return picks, weights

    return OffloadedMlp


def adopt_sparse_layers(model: Any, stock: Any = None, extension: Extension | None = None) -> list[Any]:
    """Make every sparse layer of an unloaded text model ours; gives them in order.

    The instance changes its class, which keeps the module lists that the model has built already. stock: the
    class of sparse layers, None for the package's. extension: see OffloadedMlp.adopt.
    """
    stock = stock or stock_class()
    ours: Any = make_offloaded_class(stock)
    layers: list[Any] = []
    num_cuts = 0  # latent attentions since the last sparse layer
    for module in model.modules:
        attention, mlp = (getattr(module, name, None) for name in ("attn", "mlp"))
        is_cut = attention is not None and is_latent_attention(attention)
        num_cuts += is_cut
        if isinstance(mlp, stock):
            mlp.__class__ = ours
            is_led = bool(layers) and (num_cuts == 0 or (num_cuts == 1 and is_cut))
            mlp.adopt(len(layers), extension, is_led=is_led, is_across=is_led and is_cut)
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
