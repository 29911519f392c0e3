"""A sparse layer of the package whose experts live in the offload: four seams, methods or attributes.

forward             begin_layer before the router, end_layer behind the experts        prefill
routing_fn          plan_layer behind the router: it may zero weights; land_layer, which
                    in fast mode runs the experts in VRAM while the others travel      decode
cpu_split_combine   called behind the experts: what others computed is added           decode
shared_experts      runs beside the routed experts, on a stream of its own             decode, fast mode

The package runs the shared expert before the routed ones, in the same call, on a GPU that is mostly idle
while the routed ones arrive over the link. Beside them it delays nobody; it begins behind the plan, not
before the router, for which link and CPU wait. Its products then go through the
matrices' ordinary kernels, whose sums differ in rounding: `exact` leaves it where it is.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from glm53srv.engine.cuda.graphs import is_latent_attention
from glm53srv.offload.device.gpu.gpu_memory import LayerTables
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.offload.device.gpu.launch import RouterWeights


def stock_class() -> Any:
    """Give the package's class of sparse layers."""
    return importlib.import_module("exllamav3.modules.block_sparse_mlp").BlockSparseMLP


class SharedBeside:
    """Stands for a layer's shared expert; begin() runs it on a side stream, forward() gives what it found."""

    def __init__(self, mlp: Any, stream: Any) -> None:
        self.mlp = mlp
        self._stream = stream
        self._found: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mlp, name)

    def begin(self, x: Any, params: dict[str, Any], event: Any) -> None:
        """Enqueue it behind an event of the current stream, beside what comes next there; forward() must
        follow.

        What it returns was allocated for the side stream, which waits for the main one before its next use:
        so its memory may be given back as soon as the main stream's use is enqueued.
        """
        self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            self._found = self.mlp.forward(x, params)

    def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
        """Give begin's rows, behind a wait; without it, compute them here."""
        found, self._found = self._found, None
        if found is None:
            return self.mlp.forward(x, params, out_dtype)
        torch.cuda.current_stream().wait_stream(self._stream)
        return found


def make_offloaded_class(base: Any) -> type[Any]:
    """Derive the class; at run time, since its base is the package's."""

    class OffloadedMlp(base):  # type: ignore[misc]
        """Takes over an instance that has not loaded yet: see adopt."""

        def adopt(
            self, sparse_layer: int, side_stream: Any = None, *, is_led: bool = False, is_across: bool = False
        ) -> None:
            """Become a layer of the offload; without one, experts are read where their tensors lie.

            side_stream: for the shared expert, None to leave it to the package. is_led: it follows another
            sparse layer, with no latent attention between or with that of its own block: is_across.
            """
            self.sparse_layer = sparse_layer
            self.is_led = is_led
            self.is_across = is_across
            self.offload: GpuOffload | None = None
            self._side_stream = side_stream
            self._shared_input: Any = None  # of the decode step that runs
            self._stock_routing: Any = self.routing_fn
            self.routing_fn: Any = self._plan_behind_router

        def change_routing(self, wrap: Any) -> None:
            """Replace the router by wrap(router); for measurements. Before the first step."""
            self._stock_routing = wrap(self._stock_routing)

        def load_local(self, **options: Any) -> None:
            """Build the compiled path; without the shared expert if that runs beside it."""
            shared = self.shared_experts if self._side_stream is not None else None
            if shared is None:
                super().load_local(**options)
                return
            self.shared_experts: Any = None
            try:
                super().load_local(**options)
            finally:
                self.shared_experts = SharedBeside(shared, self._side_stream)

        def forward(self, x: Any, params: dict[str, Any], out_dtype: Any = None) -> Any:
            offload = self.offload
            if offload is None:
                return super().forward(x, params, out_dtype)
            offload.begin_layer(self.sparse_layer)
            if self._side_stream is not None and offload.is_decoding:
                self._shared_input = x
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
                shared_input, self._shared_input = self._shared_input, None

                def run_shared(planned: Any) -> None:
                    if shared_input is not None:
                        self.shared_experts.begin(shared_input, params, planned)

                def run(own: Any) -> Any:
                    return self._run_experts(z, picks, own)

                self.offload.land_layer(self.sparse_layer, z, run, run_shared)
            return picks, weights

        def _run_experts(self, x: Any, picks: Any, weights: Any) -> Any:
            """Run the decode kernel; gives its sums, which its next run overwrites."""
            self.bc.run_bszN(x, picks, weights)
            return self.experts_cfg.out_bszn[: len(x)]

    return OffloadedMlp


def adopt_sparse_layers(model: Any, stock: Any = None, side_stream: Any = None) -> list[Any]:
    """Make every sparse layer of an unloaded text model ours; gives them in order.

    The instance changes its class, which keeps the module lists that the model has built already. stock: the
    class of sparse layers, None for the package's. side_stream: see OffloadedMlp.adopt.
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
            mlp.adopt(len(layers), side_stream, is_led=is_led, is_across=is_led and is_cut)
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
