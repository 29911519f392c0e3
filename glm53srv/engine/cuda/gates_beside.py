"""A KDA layer's gates beside its projection: a decode step's kernels of the package, on two streams.

    main    norm -- qkv projection ------------- gate, convolution, delta rule, norm, output projection
    side       `--- beta, forget and output gate --'

The package's compiled path launches all of them in one row. The gates are five products of 3 to 7 us each,
which leave nearly all of a card idle; the projection in front of them took 46 (H200, traced, 2026-11-30).
Kernels and their arguments are the ones of that path, so the bits are, too.

Only for steps that are captured into a graph: launched from Python, the kernels would come too slowly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glm53srv.offload.device.gpu.look_ahead import Stream


@dataclass(frozen=True, slots=True)
class TwoStreams:
    """side: where gates run. main: gives the stream that layers run on now. on: makes a stream the current
    one for a while."""

    side: Stream
    main: Callable[[], Stream]
    on: Callable[[Any], contextlib.AbstractContextManager[Any]]


def make_two_streams(device: torch.device) -> TwoStreams:
    """Make them on a GPU."""
    return TwoStreams(torch.cuda.Stream(device), lambda: torch.cuda.current_stream(device), torch.cuda.stream)


class GatesBeside:
    """Stands in for compiled paths while a step is captured. Engine thread only.

    One for a model: its layers share the buffers, since none of them runs beside another.
    """

    def __init__(self, extension: Any, streams: TwoStreams) -> None:
        """extension: the package's compiled part."""
        self._extension = extension
        self._streams = streams
        self._buffers: dict[tuple[int, ...], _Buffers] = {}
        self.is_on = True  # from the next capture on; for measurements

    @contextlib.contextmanager
    def standing_in(self, layers: Sequence[Any], rows: int) -> Iterator[None]:
        """Let loaded KDA layers run so inside, in steps of so many rows, as far as they can: can_stand_in.

        Enter it before the capture begins: buffers that are missing are allocated.
        """
        changed = [(layer, layer.bc) for layer in layers if self.is_on and can_stand_in(layer)]
        for layer, _ in changed:
            layer.bc = _Launches(layer, self._extension, self._buffers_of(layer, rows), self._streams)
        try:
            yield
        finally:
            for layer, usual in changed:
                layer.bc = usual

    def _buffers_of(self, layer: Any, rows: int) -> _Buffers:
        sizes = (layer.hidden_size, layer.fdim_qkv, layer.num_v_heads, layer.k_head_dim, layer.v_head_dim)
        key = (rows, *sizes)
        if key not in self._buffers:
            self._buffers[key] = _make_buffers(rows, *sizes, layer.device)
        return self._buffers[key]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What the kernels of a layer leave each other, (rows, 1, ...). rotated_x, rotated: of the projections'
    inputs."""

    qkv: torch.Tensor
    beta_in: torch.Tensor
    forget_low: torch.Tensor
    forget: torch.Tensor
    gate_low: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor
    mixed: torch.Tensor
    convolved: torch.Tensor
    summed: torch.Tensor
    normed: torch.Tensor
    rotated_x: torch.Tensor
    rotated: torch.Tensor


def _make_buffers(
    rows: int, hidden: int, columns: int, heads: int, key: int, value: int, device: Any
) -> _Buffers:
    def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((rows, *shape), dtype=dtype, device=device)

    half, single, brain = torch.float16, torch.float32, torch.bfloat16
    return _Buffers(
        qkv=make(single, 1, columns),
        beta_in=make(single, 1, heads),
        forget_low=make(single, 1, key),
        forget=make(single, 1, heads * key),
        gate_low=make(single, 1, value),
        gate=make(single, 1, heads, value),
        beta=make(brain, 1, heads),
        decay=make(single, 1, heads, key),
        mixed=make(brain, columns, 1),
        convolved=make(brain, 1, columns),
        summed=make(brain, 1, heads, value),
        normed=make(half, 1, heads * value),
        rotated_x=make(half, 1, hidden),
        rotated=make(half, 1, heads * value),
    )


class _Launches:
    """Stands for one layer's compiled path, as far as the layer's forward calls it."""

    def __init__(self, layer: Any, extension: Any, buffers: _Buffers, streams: TwoStreams) -> None:
        self._layer, self._run, self._buffers, self._streams = layer, extension, buffers, streams

    def needs_configure(self, rows: int, length: int, history: bool) -> bool:
        """Tell that there is nothing to set up."""
        return False

    def run_bszN(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        history: bool,
    ) -> None:
        """Enqueue the layer: x float16 (rows, 1, hidden) to y, the states of `slots` changed in place."""
        layer, run, streams, own = self._layer, self._run, self._streams, self._buffers
        main = streams.main()
        streams.side.wait_event(main.record_event())
        with streams.on(streams.side):  # enqueued first: they are small and leave room for the projection
            run.gdn_ba_gemv(x, layer.kda_b_t, None, own.beta_in)
            run.gdn_ba_gemv(x, layer.kda_fa_t, None, own.forget_low)
            run.gdn_ba_gemv(x, layer.kda_ga_t, None, own.gate_low)
            run.gdn_lowrank_gemv_f(own.forget_low, layer.kda_fb_t, own.forget)
            run.gdn_lowrank_gemv_f(own.gate_low, layer.kda_gb_t, own.gate.flatten(2))
        gated = streams.side.record_event()
        self._multiply(layer.qkv_proj, x, own.qkv, own.rotated_x)
        main.wait_event(gated)
        run.kda_gate_op(
            own.qkv,
            own.beta_in,
            own.forget,
            layer.dt_bias_bc,
            layer.a_log,
            own.mixed,
            own.beta,
            own.decay,
            float(layer.gate_lower_bound or 0.0),
            layer.beta_scale,
        )
        weights = (layer.conv1d_weight_flat, layer.conv1d_bias)
        run.cuda_causal_conv1d_update(own.mixed, conv_state, slots, *weights, own.convolved, True, history)
        heads = (layer.num_k_heads, layer.num_v_heads, layer.k_head_dim, layer.v_head_dim)
        run.cuda_recurrent_gated_delta_rule(
            own.convolved, own.decay, own.beta, state, own.summed, *heads, slots, history
        )
        layer.norm.bc.run(own.summed, own.normed, own.gate)
        self._multiply(layer.o_proj, own.normed, y, own.rotated)

    def _multiply(self, linear: Any, x: torch.Tensor, y: torch.Tensor, rotated: torch.Tensor) -> None:
        inner = linear.inner
        kind = (-1, inner.mcg, inner.mul1, 0)  # its own choice of shape and multiprocessors
        self._run.exl3_gemm(x, inner.trellis, y, inner.suh, rotated, inner.svh, *kind)


def can_stand_in(layer: Any) -> bool:
    """Tell whether a recurrent layer is a KDA layer with a compiled path that has run, and without biases."""
    if not (layer.bc_split and layer.kda and layer.ba_weight_filled):
        return False
    return all(linear.inner.bias is None for linear in (layer.qkv_proj, layer.o_proj))
