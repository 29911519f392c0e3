"""A decode step as a few CUDA graphs: the host launches a dozen in place of over a thousand kernels.

    inputs written -> graph -> attention -> graph -> attention -> ... -> graph -> logits

A graph holds everything from one latent attention to the next: three KDA layers, the expert layers with
plan and CPU part, hyper-connections. Only the first is short: the device begins a graph when the host has
launched it whole, which took 180 us for 73 kernels of three blocks (H200, traced, 2026-11-30), and until the
first has begun it is idle. Up to the end of the first KDA layer there are 16, and they run for 130 us: the
host launches the next graph meanwhile. The attention itself is called between two graphs as before, since its
kernels take lengths of the context from the host. What differs from step to step is read from device memory
that keeps its place, see step_inputs.py; the first graph begins with its copy from the host, so that nothing
but this graph's launch stands between a token and its step.

The package captures small graphs of its own, which must not be launched while ours are captured. It does so
from a shape's second run on; a layer that was set up anew runs plainly once, and that run is captured.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from glm53srv.engine.cuda.gates_beside import GatesBeside
from glm53srv.engine.cuda.step_inputs import DecodeRows, Embedding, StepInputs

logger = logging.getLogger(__name__)


class Planner(Protocol):
    """The offload, as far as a capture needs it."""

    def planning(self, num_rows: int, first_job: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Let the layers plan steps of num_rows rows that are captured and not run.

        first_job: int32 (1,) on the device, where each step finds the number of its first CPU job.
        """


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded model's modules in order: those before the blocks, the blocks, those behind them."""

    prolog: list[Any]
    blocks: list[Any]
    epilog: list[Any]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A graph and the attention behind it, None behind the first if it is short, and behind the last.

    x, y: what the attention takes and where that goes."""

    graph: torch.cuda.CUDAGraph
    attention: Any = None
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None


class Recorder:
    """What all captures of a model share: cuBLAS holds a workspace for each stream that it meets.

    scratch: gives the package's workspaces. Graphs write to them by address, and the package drops them all
    when the process loads another model.
    """

    def __init__(self, scratch: Callable[[], list[Any]]) -> None:
        self.scratch = scratch
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Run on the stream of the captures, with the device idle before and after."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin a graph; its capture_end() ends it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may call the driver meanwhile: the log's, the watchdog's.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


MOST_BY_ROW = 2
"""In fast mode, see DecodeGraph. Four rows took 106 ms a step one by one and 98 in one call, two 52.7 and
53.4 (medians of one start, H200, 2026-11-30)."""


class DecodeGraph:
    """Steps of one width. Everything on the engine thread, under torch.inference_mode().

    most_by_row: up to so many rows the attention is called row by row, as for one: the package has a compiled
    path for one row only. Its sums differ in rounding from those of the call for all rows. gates: lets KDA
    layers compute theirs beside their projections, None for the package's own call.
    """

    def __init__(
        self,
        parts: Parts,
        cache: Any,
        width: int,
        max_pages: int,
        recorder: Recorder,
        *,
        most_by_row: int,
        gates: GatesBeside | None = None,
    ) -> None:
        self._modules = [*parts.prolog[1:], *parts.blocks, *parts.epilog]
        self._cache = cache
        self._width = width
        self._by_row = 1 < width <= most_by_row
        self._recorder = recorder
        self._gates = gates
        self._attentions = [block.attn for block in parts.blocks if is_latent_attention(block.attn)]
        self._recurrent = [block.attn for block in parts.blocks if not is_latent_attention(block.attn)]
        self._first = parts.blocks[0].attn
        self._mlps = [block.mlp for block in parts.blocks]
        self._segments: list[_Segment] = []
        self._kept: list[Any] = []  # objects of the package whose memory the graphs read
        self._inputs = StepInputs(width, max_pages, Embedding(parts.prolog[0]), parts.blocks[0].device)
        self._logits: torch.Tensor | None = None

    def capture(self, planner: Planner) -> None:
        """Record the step; its width must have run plainly. Raises RuntimeError if it cannot be captured."""
        self._renew()
        params = {
            "attn_mode": "flash_attn",
            "cache": self._cache,
            "recurrent_states": [_AnyState(self._cache)] * self._width,
            "recurrent_slots": self._inputs.slots,
            "recurrent_history": False,
            "indexed_embeddings": [],
            "layer_instance": 0,
        }
        inputs = self._inputs
        x = inputs.x
        inputs.fetch()  # a kernel that was not loaded yet could not be captured
        gates = self._gates
        with (
            contextlib.nullcontext() if gates is None else gates.standing_in(self._recurrent, self._width),
            self._recorder.recording(),
            planner.planning(self._width, inputs.first_job),
            self._cutting(),
        ):
            self._graph = self._recorder.begin()
            try:
                inputs.fetch()
                for module in self._modules:
                    x = module.forward(x, params)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self._graph.capture_end()
                self._segments.clear()
                raise
            self._graph.capture_end()
            self._segments.append(_Segment(self._graph))
        self._logits = x[:, 0]
        self._kept += self._recorder.scratch()

    def run(self, rows: DecodeRows) -> torch.Tensor:
        """Enqueue a step; gives its logits, (rows, padded vocabulary), which the next one overwrites."""
        self._inputs.write(rows)
        calls: list[dict[str, Any]] = []
        for segment in self._segments:
            segment.graph.replay()
            if segment.attention is not None:
                assert segment.x is not None
                assert segment.y is not None
                calls = calls or self._attention_params(rows)  # not before the device has something to do
                self._attend(segment.attention, segment.x, segment.y, calls)
        assert self._logits is not None
        return self._logits

    def _attention_params(self, rows: DecodeRows) -> list[dict[str, Any]]:
        """Make the arguments of the attention's calls: one for all rows, or one a row."""
        lengths, table, positions = self._inputs.lengths, self._inputs.table(rows.table_pages), rows.positions
        step = 1 if self._by_row else self._width
        return [
            {
                "attn_mode": "flash_attn",
                "cache": self._cache,
                "block_table": table[row : row + step],
                "cache_seqlens": lengths[row : row + step],
                "positions": lengths[row : row + step],
                "_mla_host_seqlens": list(positions[row : row + step]),
                "layer_instance": 0,
            }
            for row in range(0, self._width, step)
        ]

    @staticmethod
    def _attend(attention: Any, x: torch.Tensor, y: torch.Tensor, calls: list[dict[str, Any]]) -> None:
        step = len(x) // len(calls)
        for index, params in enumerate(calls):
            rows = slice(index * step, (index + 1) * step)
            y[rows].copy_(attention.forward(x[rows], params))

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[None]:
        """End the graph in front of every attention and begin the next behind it; end the first early."""

        def cut(attention: Any, x: torch.Tensor) -> torch.Tensor:
            self._graph.capture_end()
            y = torch.zeros(x.shape, dtype=output_type(attention), device=x.device)
            self._segments.append(_Segment(self._graph, attention, x, y))
            self._graph = self._recorder.begin()
            return y

        def end_early(forward: Any, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
            y: torch.Tensor = forward(x, params)
            self._graph.capture_end()
            self._segments.append(_Segment(self._graph))
            self._graph = self._recorder.begin()
            return y

        changed = list(self._attentions)
        for attention in self._attentions:
            attention.forward = lambda x, params, out_dtype=None, own=attention: cut(own, x)
        if not is_latent_attention(self._first):
            usual = self._first.forward
            self._first.forward = lambda x, params, out_dtype=None: end_early(usual, x, params)
            changed.append(self._first)
        try:
            yield
        finally:
            for layer in changed:
                del layer.forward

    def _renew(self) -> None:
        """Set up anew what would launch a graph of the package's."""
        for layer in self._recurrent:
            if not layer.bc_split:
                continue  # runs from Python: convolution weights in fp32, see weights.py
            layer._bc_configure_slot_kda(self._width, 1, False)
        for mlp in filter(None, map(_gated, self._mlps)):
            if mlp.bc is not None:
                self._kept += [mlp.bc, mlp.multi_gu[0]]
                mlp.multi_gu[0] = None
                mlp.load_local(mlp.device, 0)


@dataclass(frozen=True, slots=True)
class _AnyState:
    """Stands for a recurrent state where only its cache matters."""

    cache: Any
    exported: bool = False


def _gated(mlp: Any) -> Any:
    """Give the gated network that a block runs as one of the package's graphs: dense, or a shared expert."""
    if hasattr(mlp, "multi_gu"):
        return mlp
    if not mlp.bc_sh_exp:
        return getattr(mlp.shared_experts, "mlp", mlp.shared_experts)
    if not mlp.shared_coop_ok():
        raise RuntimeError("the shared expert runs as a graph inside of exllamav3's call")
    return None


def is_latent_attention(attention: Any) -> bool:
    """Tell a block's latent attention from its recurrent layer."""
    return bool(attention.caps.get("kv_cache"))


def output_type(attention: Any) -> torch.dtype:
    """Give the type in which an attention returns its rows."""
    return attention.out_dtype or attention.o_proj.inner.default_out_dtype
