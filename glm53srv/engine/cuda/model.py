"""The text model in exllamav3's modules, run by our own loop, so that a prefill can pause between layers.

    begin_chunk -> run_layers [0, a) -> run_layers [a, b) ... -> last_hidden -> head        prefill
    decode                                                                                  one step

One thread, under torch.inference_mode(). The package's scratch belongs to the device, and nothing in it is
live between two modules: a decode step between two layers of a chunk changes no bit of either.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.engine.cuda.gates_beside import GatesBeside
from glm53srv.engine.cuda.graphs import DecodeGraph, Parts, Planner, Recorder
from glm53srv.engine.cuda.host_logits import HostLogits, SentLogits
from glm53srv.engine.cuda.step_inputs import DecodeRows

PAGE_TOKENS = 256
"""The package's page of the cache."""
TABLE_STEP = 16
"""Block tables are padded to a multiple of this many pages, so that kernels see few widths."""


@dataclass(slots=True)
class Chunk:
    """A prefill chunk in flight. x: activations between two modules, on the device."""

    ids: torch.Tensor
    params: dict[str, Any]
    x: torch.Tensor
    is_last: bool


class CudaModel:
    """A loaded model with its cache. Owns neither weights nor states' slots beyond the package's lifetime."""

    def __init__(self, model: Any, cache: Any, vocab_size: int, gates: GatesBeside | None = None) -> None:
        """gates: for captured steps, see DecodeGraph."""
        self.gates = gates
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size
        self._host_logits = HostLogits(vocab_size)
        recurrent = importlib.import_module("exllamav3.cache.recurrent_util")
        self._advance = recurrent.advance_recurrent_states
        modules = [module for module, _, _ in model.fwd_modules]
        blocks = [index for index, module in enumerate(modules) if module.layer_idx is not None]
        first, end = blocks[0], blocks[-1] + 1
        self._prolog, self._blocks, self._epilog = modules[:first], modules[first:end], modules[end:]
        self._recorder: Recorder | None = None
        self._graphs: dict[int, DecodeGraph] = {}
        head = [bool(module.caps.get("logits_output")) for module in self._epilog]
        if head != [False] * (len(head) - 1) + [True]:
            raise ValueError("the model's modules are not in the expected order")

    @property
    def num_layers(self) -> int:
        return len(self._blocks)

    def capture(self, width: int, planner: Planner, *, most_by_row: int) -> None:
        """Capture decode steps of `width` rows, which have run plainly, see graphs.py.

        Raises RuntimeError where that cannot be done.
        """
        if self._recorder is None:
            shared = importlib.import_module("exllamav3.util.tensor").g_tensor_cache
            self._recorder = Recorder(lambda: list(shared.cache.values()))
        parts = Parts(self._prolog, self._blocks, self._epilog)
        max_pages = -(-self._cache.max_num_tokens // PAGE_TOKENS // TABLE_STEP) * TABLE_STEP
        graph = DecodeGraph(
            parts, self._cache, width, max_pages, self._recorder, most_by_row=most_by_row, gates=self.gates
        )
        graph.capture(planner)
        self._graphs[width] = graph

    @property
    def captured_widths(self) -> tuple[int, ...]:
        """Numbers of rows whose decode steps are graphs."""
        return tuple(sorted(self._graphs))

    def is_captured(self, width: int) -> bool:
        """Tell whether decode steps of `width` rows are graphs."""
        return width in self._graphs

    def drop_graphs(self) -> None:
        """Decode without graphs, until a width is captured again; the device must be idle.

        The recorder goes too: torch ends a pool of graphs with the last of them.
        """
        self._graphs.clear()
        self._recorder = None

    def new_state(self) -> Any:
        """Take a recurrent state, zeroed; at most as many as streams. Give it back with state.free()."""
        return self._cache.get_new_state()

    def begin_chunk(
        self, token_ids: Sequence[int], state: Any, page_ids: Sequence[int], start: int, *, is_last: bool
    ) -> Chunk:
        """Embed a chunk. is_last: its last row's logits are wanted, so the last layer runs whole."""
        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        num_pages = -(-(start + len(token_ids)) // PAGE_TOKENS)
        params = self._params([page_ids[:num_pages]], num_pages, [start], [state])
        params["layer_instance"] = 0
        x = self._model.prepare_inputs(ids, params)
        for module in self._prolog:
            x = module.forward(module.prepare_for_device(x, params), params)
        return Chunk(ids, params, x, is_last)

    def run_layers(self, chunk: Chunk, begin: int, end: int, *, wants_rows: bool) -> list[float]:
        """Run blocks [begin, end); behind the last one the chunk's states are advanced.

        wants_rows: some row's logits are wanted. Without it, and for a chunk that is not the last, the last
        block stops behind its attention: nothing after it has a memory. Gives each block's seconds on the
        host, which are the device's too where a sparse layer counts its rows there (more than 32 of them).
        """
        x, params = chunk.x, chunk.params
        layers_s = []
        for index in range(begin, end):
            begin_s = time.perf_counter()
            module = self._blocks[index]
            params["prefill"] = index == self.num_layers - 1 and not (chunk.is_last or wants_rows)
            x = module.forward(module.prepare_for_device(x, params), params)
            layers_s.append(time.perf_counter() - begin_s)
        del params["prefill"]
        chunk.x = x
        if end == self.num_layers:
            self._advance(chunk.ids, params, self._model)
        return layers_s

    def last_hidden(self, chunk: Chunk) -> torch.Tensor:
        """Give the normed rows of a chunk behind its last block, (1, tokens, hidden)."""
        x, params = chunk.x, chunk.params
        for module in self._epilog[:-1]:
            x = module.forward(module.prepare_for_device(x, params), params)
        return x

    def head(self, chunk: Chunk, hidden: torch.Tensor) -> NDArray[np.float32]:
        """Give logits of some of last_hidden's rows: float32 (rows, vocabulary). Waits for the device."""
        module = self._epilog[-1]
        y = module.forward(module.prepare_for_device(hidden.contiguous(), chunk.params), chunk.params)
        rows: NDArray[np.float32] = y[0, :, : self._vocab_size].float().cpu().numpy()
        return rows

    def decode(
        self,
        token_ids: Sequence[int],
        states: list[Any],
        page_ids: Sequence[Sequence[int]],
        positions: list[int],
        first_job: int,
    ) -> SentLogits:
        """Enqueue one token of each row, and behind it the logits' way to the host; see to_host.

        first_job: what the offload's begin_decode gave; a step that is no graph does not look at it.
        """
        width = (
            -(-max(-(-(position + 1) // PAGE_TOKENS) for position in positions) // TABLE_STEP) * TABLE_STEP
        )
        graph = self._graphs.get(len(token_ids))
        if graph is not None:
            slots = [state.slot for state in states]
            logits = graph.run(DecodeRows(token_ids, slots, page_ids, positions, width, first_job))
            ids = torch.empty((len(token_ids), 1), dtype=torch.int64)
            self._advance(ids, {"recurrent_states": states}, self._model)
            return self._host_logits.send(logits)
        params = self._params(page_ids, width, positions, states)
        ids = torch.tensor([[token] for token in token_ids], dtype=torch.int64)
        return self._host_logits.send(self._model.forward(ids, params)[:, 0])

    def to_host(self, logits: SentLogits) -> NDArray[np.float32]:
        """Wait for a step's logits: float32 (rows, vocabulary), borrowed until the next step.

        What was enqueued behind decode() may still run when they are there.
        """
        return logits.wait()

    def _params(
        self, page_ids: Sequence[Sequence[int]], width: int, positions: list[int], states: list[Any]
    ) -> dict[str, Any]:
        """Make the arguments of a forward; fresh each time, as the package keeps device copies in them."""
        table = torch.zeros((len(page_ids), width), dtype=torch.int32)
        for row, pages in enumerate(page_ids):
            used = list(pages)[:width]
            table[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        return {
            "attn_mode": "flash_attn",
            "cache": self._cache,
            "block_table": table,
            "cache_seqlens": torch.tensor(positions, dtype=torch.int32),
            "recurrent_states": states,
            "recurrent_history": False,
            "indexed_embeddings": [],
            "positions": None,
        }

    def wait(self) -> None:
        """Wait until the device has done all that was enqueued."""
        torch.cuda.synchronize()

    def unload(self) -> None:
        """Free weights and cache; the device must be idle."""
        self._graphs.clear()
        self._model.unload()
        torch.cuda.empty_cache()
