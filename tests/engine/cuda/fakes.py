"""A model and an offload for the CUDA engine without a GPU: logits are a function of the tokens so far."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.loading import CudaOptions, OpenedOffload
from glm53srv.engine.sampler import SamplerBank

NUM_LAYERS, VOCAB, EOS = 6, 97, (1,)
PADDED_VOCAB = 128


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Give float32 (padded vocabulary,) for what follows these tokens."""
    seed = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    return np.random.default_rng(seed).normal(size=PADDED_VOCAB).astype(np.float32)


@dataclass
class FakeState:
    """One sequence's memory: its tokens. frees: how often it was given back."""

    model: FakeModel
    tokens: list[int] = field(default_factory=list)
    frees: int = 0

    @property
    def position(self) -> int:
        return len(self.tokens)

    @position.setter
    def position(self, position: int) -> None:
        """Pretend a context of this length."""
        self.tokens = [0] * position

    def free(self) -> None:
        self.frees += 1
        self.model.num_states -= 1


@dataclass
class FakeChunk:
    token_ids: list[int]
    state: FakeState
    start: int
    is_last: bool
    next_layer: int = 0


@dataclass
class FakeModel:
    """Stands for CudaModel. fails_at: (layer) at which the next chunk runs out of memory."""

    num_layers: int = NUM_LAYERS
    num_states: int = 0
    fails_at: int | None = None
    is_unloaded: bool = False
    wanted_rows: list[bool] = field(default_factory=list)
    refuses_width: int | None = None
    captured: list[tuple[int, int]] = field(default_factory=list)
    first_jobs: list[int] = field(default_factory=list)
    page_ids: list[list[tuple[int, ...]]] = field(default_factory=list)

    def new_state(self) -> FakeState:
        self.num_states += 1
        return FakeState(self)

    def begin_chunk(
        self,
        token_ids: Sequence[int],
        state: FakeState,
        page_ids: Sequence[int],
        start: int,
        *,
        is_last: bool,
    ) -> FakeChunk:
        assert start == len(state.tokens)
        return FakeChunk(list(token_ids), state, start, is_last)

    def run_layers(self, chunk: FakeChunk, begin: int, end: int, *, wants_rows: bool) -> list[float]:
        assert begin == chunk.next_layer
        if self.fails_at is not None and begin <= self.fails_at < end:
            self.fails_at = None
            raise torch.OutOfMemoryError("out of memory, tried to allocate much\nand more")
        chunk.next_layer = end
        self.wanted_rows.append(wants_rows)
        if end == self.num_layers:
            chunk.state.tokens += chunk.token_ids
        return [0.001] * (end - begin)

    def last_hidden(self, chunk: FakeChunk) -> torch.Tensor:
        places = torch.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=torch.float32)
        return places.view(1, -1, 1)

    def head(self, chunk: FakeChunk, hidden: torch.Tensor) -> NDArray[np.float32]:
        tokens = chunk.state.tokens
        rows = [logits_after(tokens[: int(place) + 1])[:VOCAB] for place in hidden.flatten().tolist()]
        return np.stack(rows)

    def decode(
        self,
        token_ids: Sequence[int],
        states: Sequence[FakeState],
        page_ids: Sequence[Sequence[int]],
        positions: Sequence[int],
        first_job: int,
    ) -> torch.Tensor:
        self.first_jobs.append(first_job)
        self.page_ids.append([tuple(pages) for pages in page_ids])
        for token, state, position in zip(token_ids, states, positions, strict=True):
            assert position == len(state.tokens)
            state.tokens.append(token)
        return torch.from_numpy(np.stack([logits_after(state.tokens) for state in states]))

    def to_host(self, logits: torch.Tensor) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = logits[:, :VOCAB].numpy()
        return rows

    def capture(self, width: int, planner: Any, *, most_by_row: int) -> None:
        if width == self.refuses_width:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.captured.append((width, most_by_row))

    @property
    def captured_widths(self) -> tuple[int, ...]:
        return tuple(width for width, _ in self.captured)

    def is_captured(self, width: int) -> bool:
        return width in self.captured_widths

    def drop_graphs(self) -> None:
        self.captured.clear()

    def wait(self) -> None:
        """Nothing runs."""

    def unload(self) -> None:
        self.is_unloaded = True


@dataclass
class FakeOffload:
    """Stands for GpuOffload; notes the brackets in order. Steps' first jobs are numbered 1000, 1001, ..."""

    calls: list[str] = field(default_factory=list)
    captured_steps: list[bool] = field(default_factory=list)
    report: None = None
    last_picks: NDArray[np.int32] | None = None

    def begin_chunk(self, num_tokens: int) -> None:
        self.calls.append(f"chunk {num_tokens}")

    def stage_chunk(self) -> None:
        self.calls.append("stage")

    def end_chunk(self, is_more_waiting: bool) -> None:
        self.calls.append(f"end {'more' if is_more_waiting else 'last'}")

    def begin_decode(self, num_rows: int, *, is_captured: bool) -> int:
        self.calls.append(f"decode {num_rows}")
        self.captured_steps.append(is_captured)
        return 999 + len(self.captured_steps)

    def end_decode(self, step_ms: float) -> None:
        assert step_ms > 0
        self.calls.append("enqueued")

    def finish_decode(self) -> None:
        self.calls.append("finished")

    def tell(self) -> None:
        self.calls.append("tell")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class FakeRoom:
    """Stands for PageRoom; notes what is asked among the offload's calls. most: pages it has memory for."""

    offload: FakeOffload
    most: int = 8
    num_pages: int = 0

    def fill(self, num_pages: int) -> None:
        self.offload.calls.append(f"fill {num_pages}")
        if num_pages > max(self.most, self.num_pages):
            raise torch.OutOfMemoryError("no memory for pages\nand more")
        self.num_pages = max(self.num_pages, num_pages)

    def empty(self, num_pages: int) -> bool:
        self.offload.calls.append(f"empty {num_pages}")
        return True

    def close(self) -> None:
        self.offload.calls.append("close pages")


def make_engine(
    model: FakeModel, offload: FakeOffload, max_chunk_tokens: int = 16, room: FakeRoom | None = None
) -> CudaEngine:
    """Build the engine around them."""
    config = SimpleNamespace(max_context_tokens=4096, vocab_size=VOCAB, eos_token_ids=EOS, is_random=True)
    arena = SimpleNamespace(close=lambda: None, abandon=lambda: None)
    loaded: Any = SimpleNamespace(config=config, model=model, layers=[], arena=arena, device="cpu")
    sampler = SamplerBank(VOCAB, EOS)
    options = CudaOptions(cache_tokens=2048, graphs=False)
    taken: Any = offload
    page_room: Any = room
    return CudaEngine(loaded, sampler, options, OpenedOffload(taken, max_chunk_tokens, page_room))
