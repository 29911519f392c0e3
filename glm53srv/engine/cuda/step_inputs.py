"""What changes from one decode step to the next, written on the host and fetched by the step's first kernel.

    word       what
    ----       ----
    0          number of the step's first CPU job, then 3 words of nothing
    4 ..       the tokens' embeddings, then for each row its length and its recurrent state's slot
    .. end     the block table, (rows, pages): as wide as the step needs, at most max_pages

The kernel is in the step's graph, so it always fetches the whole buffer: of a table that the step does not
fill the rest is old. Between the logits of a step and the launch of the next only what depends on the tokens
is written; a table that has not changed is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glm53srv.offload.device.gpu.host_reader import launch_fetch

HEADER_WORDS = 4
"""16 bytes: kernels are compiled for pointers to multiples of it."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A decode step's rows, in order. slots: of their recurrent states. page_ids: each row's, enough for
    position + 1 tokens; all are cut to table_pages. first_job: as an int32, see offload's begin_decode."""

    token_ids: Sequence[int]
    slots: Sequence[int]
    page_ids: Sequence[Sequence[int]]
    positions: Sequence[int]
    table_pages: int
    first_job: int


class StepInputs:
    """Owns the two buffers of one width. Engine thread only.

    The host's is written when the step before, which fetches it, was waited for. On the device everything has
    a place that stays: x (width, 1, hidden) of the embedding's type; first_job, lengths, slots int32.
    """

    def __init__(self, width: int, max_pages: int, embedding: Embedding, device: Any) -> None:
        """Allocate for `width` rows with up to max_pages pages each."""
        sample = embedding.sample()
        hidden, dtype = sample.shape[-1], sample.dtype
        self._width, self._embedding = width, embedding
        lengths = HEADER_WORDS + _whole_16_bytes(width * hidden * dtype.itemsize)
        slots = lengths + _whole_16_bytes(4 * width)
        self._table_at = slots + _whole_16_bytes(4 * width)
        total, pins = self._table_at + width * max_pages, torch.cuda.is_available()
        self._staged = torch.zeros(total, dtype=torch.int32, pin_memory=pins)
        self._sent = torch.zeros_like(self._staged, device=device)
        numbers = self._staged.numpy()
        self._first_job = numbers[:1]
        self._lengths = numbers[lengths : lengths + width]
        self._slots = numbers[slots : slots + width]
        self._table = numbers[self._table_at :]
        self._in_table: tuple[int, list[tuple[int, ...]]] = (0, [])
        shape = (width, hidden)
        self._rows = list(self._staged[HEADER_WORDS:lengths].view(dtype)[: width * hidden].view(shape))
        self.x = self._sent[HEADER_WORDS:lengths].view(dtype)[: width * hidden].view(width, 1, hidden)
        self.first_job = self._sent[:1]
        self.lengths = self._sent[lengths : lengths + width]
        self.slots = self._sent[slots : slots + width]

    def write(self, rows: DecodeRows) -> None:
        """Write a step's values where fetch() reads them."""
        self._first_job[0] = rows.first_job
        self._lengths[:] = rows.positions
        self._slots[:] = rows.slots
        self._embedding.fill(rows.token_ids, self._rows)
        wanted = (rows.table_pages, [tuple(ids) for ids in rows.page_ids])
        if wanted != self._in_table:
            self._write_table(*wanted)
            self._in_table = wanted

    def fetch(self) -> None:
        """Enqueue the copy to the device; captured into a graph it is made at each replay."""
        launch_fetch(self._staged, self._sent)

    def table(self, pages: int) -> torch.Tensor:
        """Give the block table of a step with table_pages `pages`: int32 (width, pages), on the device."""
        return self._sent[self._table_at : self._table_at + self._width * pages].view(self._width, pages)

    def _write_table(self, pages: int, page_ids: Sequence[tuple[int, ...]]) -> None:
        table = self._table[: self._width * pages].reshape(self._width, pages)
        table[:] = 0
        for row, ids in enumerate(page_ids):
            used = ids[:pages]
            table[row, : len(used)] = used


class Embedding:
    """The package's embedding, whose rows a step takes one by one.

    Where it is nothing but a table on the host its rows are read there: the call of the module takes three
    times as long. Both give the same bits: a row, converted to the module's type.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._table = _host_table(module)

    def sample(self) -> torch.Tensor:
        """Give the row of token 0, (1, 1, hidden), of the type that all have."""
        return self._forward([0])

    def fill(self, token_ids: Sequence[int], targets: Sequence[torch.Tensor]) -> None:
        """Write each token's row, (hidden,), to its target on the host."""
        if self._table is None:
            found = list(self._forward(token_ids)[:, 0])
        else:
            found = [self._table[token] for token in token_ids]
        for row, target in zip(found, targets, strict=True):
            target.copy_(row)

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[token] for token in token_ids], dtype=torch.int64)
        embedded: torch.Tensor = self._module.forward(ids, {"indexed_embeddings": []})
        return embedded


def _host_table(module: Any) -> torch.Tensor | None:
    """Give an embedding's weights if its forward is their rows and nothing else, and they are on the host."""
    inner = getattr(module, "embedding", None)
    if inner is None or module.normalize or module.multiplier != 1.0 or inner.weight.device.type != "cpu":
        return None
    table: torch.Tensor = inner.weight.detach()
    return table


def _whole_16_bytes(num_bytes: int) -> int:
    """Give the words of 4 bytes in as many times 16 bytes as hold num_bytes."""
    return -(-num_bytes // 16) * 4
