"""A decode step as a few CUDA graphs: the host launches a dozen in place of over a thousand kernels.

    inputs copied -> graph -> attention -> graph -> attention -> ... -> graph -> logits

A graph holds everything from one latent attention to the next: three KDA layers, the expert layers with
plan and CPU part, hyper-connections. The attention itself is called between two graphs as before, since its
kernels take lengths of the context from the host. What differs from step to step is read from device memory
that keeps its place: embeddings, lengths, slots of the recurrent states, the number of the first CPU job.

The package captures small graphs of its own, which must not be launched while ours are captured. It does so
from a shape's second run on; a layer that was set up anew runs plainly once, and that run is captured.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from glm53srv.offload.device.gpu.host_reader import launch_fetch

logger = logging.getLogger(__name__)


class Planner(Protocol):
    """The offload, as far as a capture needs it."""

    def planning(self, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """Let the layers plan steps of num_rows rows that are captured and not run."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded model's modules in order: those before the blocks, the blocks, those behind them."""

    prolog: list[Any]
    blocks: list[Any]
    epilog: list[Any]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A graph and the attention behind it, None behind the last. x, y: what it takes and where it goes."""

    graph: torch.cuda.CUDAGraph
    attention: Any = None
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None


class StepInputs:
    """What changes from step to step, on the device at places that stay, sent by one kernel.

    The host's buffer is used again with the next step, by when this one's end must have been waited for.
    """

    def __init__(self, width: int, max_pages: int, hidden: int, dtype: torch.dtype, device: Any) -> None:
        """Allocate for `width` rows with up to max_pages pages each; dtype: of the embedding."""
        self._width = width
        words = -(-width * hidden * dtype.itemsize // 16) * 4  # the embedding's, then numbers, all int32
        length, pins = words + width * (2 + max_pages), torch.cuda.is_available()
        self._staged = torch.zeros(length, dtype=torch.int32, pin_memory=pins)
        self._sent = torch.zeros_like(self._staged, device=device)
        self._begin = words
        self._numbers = self._staged.numpy()[words:]
        shape = (width, 1, hidden)
        self._staged_x = self._staged[:words].view(dtype)[: width * hidden].view(shape)
        self.x = self._sent[:words].view(dtype)[: width * hidden].view(shape)
        self.lengths = self._sent[words : words + width]
        self.slots = self._sent[words + width : words + 2 * width]

    def send(
        self, x: torch.Tensor, positions: list[int], slots: list[int], tables: list[list[int]], pages: int
    ) -> torch.Tensor:
        """Enqueue the copy. x: (width, 1, hidden), on the host. Gives the block table, (width, pages)."""
        width, numbers = self._width, self._numbers
        end = width * (2 + pages)
        numbers[:width], numbers[width : 2 * width] = positions, slots
        table = numbers[2 * width : end].reshape(width, pages)
        table[:] = 0
        for row, ids in enumerate(tables):
            table[row, : len(ids)] = ids
        self._staged_x.copy_(x)
        launch_fetch(self._staged[: self._begin + end], self._sent[: self._begin + end])
        return self._sent[self._begin + 2 * width : self._begin + end].view(width, pages)


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


class DecodeGraph:
    """Steps of one width. Everything on the engine thread, under torch.inference_mode().

    by_row: the attention of several rows is called row by row, as for one: the package has a compiled path
    for one row only. Its sums differ in rounding from those of the call for all rows.
    """

    def __init__(
        self, parts: Parts, cache: Any, width: int, max_pages: int, recorder: Recorder, *, by_row: bool
    ) -> None:
        embedding = parts.prolog[0]
        self._embedding = embedding
        self._modules = [*parts.prolog[1:], *parts.blocks, *parts.epilog]
        self._cache = cache
        self._width = width
        self._by_row = by_row and width > 1
        self._recorder = recorder
        self._attentions = [block.attn for block in parts.blocks if is_latent_attention(block.attn)]
        self._recurrent = [block.attn for block in parts.blocks if not is_latent_attention(block.attn)]
        self._mlps = [block.mlp for block in parts.blocks]
        self._segments: list[_Segment] = []
        self._kept: list[Any] = []  # objects of the package whose memory the graphs read
        sample = self._embed([0] * width)
        device = parts.blocks[0].device
        self._inputs = StepInputs(width, max_pages, sample.shape[-1], sample.dtype, device)
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
        x = self._inputs.x
        with self._recorder.recording(), planner.planning(self._width), self._cutting():
            self._graph = self._recorder.begin()
            try:
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

    def run(
        self,
        token_ids: Sequence[int],
        slots: list[int],
        page_ids: Sequence[Sequence[int]],
        positions: list[int],
        table_pages: int,
    ) -> torch.Tensor:
        """Enqueue a step; gives its logits, (rows, padded vocabulary), which the next one overwrites."""
        pages = [list(ids[:table_pages]) for ids in page_ids]
        table = self._inputs.send(self._embed(token_ids), positions, slots, pages, table_pages)
        calls = self._attention_params(table, positions)
        for segment in self._segments:
            segment.graph.replay()
            if segment.attention is not None:
                assert segment.x is not None
                assert segment.y is not None
                self._attend(segment.attention, segment.x, segment.y, calls)
        assert self._logits is not None
        return self._logits

    def _embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[token] for token in token_ids], dtype=torch.int64)
        embedded: torch.Tensor = self._embedding.forward(ids, {"indexed_embeddings": []})
        return embedded

    def _attention_params(self, table: torch.Tensor, positions: list[int]) -> list[dict[str, Any]]:
        """Make the arguments of the attention's calls: one for all rows, or one a row."""
        lengths = self._inputs.lengths
        step = 1 if self._by_row else self._width
        return [
            {
                "attn_mode": "flash_attn",
                "cache": self._cache,
                "block_table": table[row : row + step],
                "cache_seqlens": lengths[row : row + step],
                "positions": lengths[row : row + step],
                "_mla_host_seqlens": positions[row : row + step],
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
        """Make every attention end the graph that leads to it, and begin the next behind it."""

        def cut(attention: Any, x: torch.Tensor) -> torch.Tensor:
            self._graph.capture_end()
            y = torch.zeros(x.shape, dtype=output_type(attention), device=x.device)
            self._segments.append(_Segment(self._graph, attention, x, y))
            self._graph = self._recorder.begin()
            return y

        for attention in self._attentions:
            attention.forward = lambda x, params, out_dtype=None, own=attention: cut(own, x)
        try:
            yield
        finally:
            for attention in self._attentions:
                del attention.forward

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
