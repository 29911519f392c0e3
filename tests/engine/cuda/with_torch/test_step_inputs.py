"""What a step reads arrives whole with one copy, at places that stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from glm53srv.engine.cuda.step_inputs import DecodeRows, Embedding, StepInputs
from glm53srv.offload.device.gpu.launch import int32_bits

VOCAB, MAX_PAGES = 19, 9


class Module:
    """An embedding of the package. forward counts its calls."""

    def __init__(self, hidden: int, stored: torch.dtype, given: torch.dtype, **facts: Any) -> None:
        weight = torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(hidden)).to(stored)
        self.embedding = SimpleNamespace(weight=weight)
        self.normalize, self.multiplier = facts.get("normalize", False), facts.get("multiplier", 1.0)
        self.given, self.num_calls = given, 0

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        self.num_calls += 1
        rows = (self.embedding.weight[ids] * self.multiplier).to(self.given)
        return rows * 2 if self.normalize else rows


def fetched(inputs: StepInputs, rows: DecodeRows) -> list[list[int]]:
    """Send a step; gives its block table."""
    inputs.write(rows)
    inputs.fetch()
    table: list[list[int]] = inputs.table(rows.table_pages).tolist()
    return table


@pytest.mark.parametrize(
    ("width", "hidden", "stored", "given"),
    [
        (1, 4, torch.half, torch.half),
        (3, 5, torch.bfloat16, torch.half),
        (4, 7, torch.bfloat16, torch.float),
        (2, 8, torch.half, torch.float),
    ],
)
def test_inputs_arrive_whole_in_any_number_of_pages(
    width: int, hidden: int, stored: torch.dtype, given: torch.dtype
) -> None:
    module = Module(hidden, stored, given)
    inputs = StepInputs(width, MAX_PAGES, Embedding(module), "cpu")
    places = [each.data_ptr() for each in (inputs.x, inputs.first_job, inputs.lengths, inputs.slots)]
    rng = np.random.default_rng(width)
    for pages in (1, 9, 4, 4):
        tokens = rng.integers(0, VOCAB, width).tolist()
        positions, slots = rng.integers(0, 999, (2, width)).tolist()
        tables = [rng.integers(1, 99, rng.integers(1, pages + 3)).tolist() for _ in range(width)]
        first_job = int(rng.integers(-(2**31), 2**31))
        table = fetched(inputs, DecodeRows(tokens, slots, tables, positions, pages, first_job))
        ids = torch.tensor([[token] for token in tokens])
        assert torch.equal(inputs.x, module.forward(ids, {}))
        assert inputs.first_job.tolist() == [first_job]
        assert inputs.lengths.tolist() == positions
        assert inputs.slots.tolist() == slots
        assert table == [(row + [0] * pages)[:pages] for row in tables]
    assert places == [each.data_ptr() for each in (inputs.x, inputs.first_job, inputs.lengths, inputs.slots)]
    assert all(place % 16 == 0 for place in places)


def test_a_table_follows_every_change_of_pages_rows_and_width() -> None:
    inputs = StepInputs(2, MAX_PAGES, Embedding(Module(4, torch.half, torch.half)), "cpu")
    steps: list[tuple[list[list[int]], int]] = [
        ([[1, 2], [3]], 2),
        ([[1, 2], [3]], 2),
        ([[1, 2], [3]], 4),
        ([[1, 2], [3, 5]], 4),
        ([[3, 5], [1, 2]], 4),
        ([[3], [1, 2]], 2),
        ([[1, 2], [3]], 2),
    ]
    for position, (tables, pages) in enumerate(steps):
        found = fetched(inputs, DecodeRows([1, 2], [0, 1], tables, [position, position], pages, 0))
        assert found == [row + [0] * (pages - len(row)) for row in tables]
        assert inputs.lengths.tolist() == [position, position]


def test_job_numbers_wrap_at_two_to_the_32() -> None:
    inputs = StepInputs(1, MAX_PAGES, Embedding(Module(4, torch.half, torch.half)), "cpu")
    for number in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32):
        fetched(inputs, DecodeRows([1], [0], [[1]], [5], 1, int32_bits(number)))
        assert int(inputs.first_job.numpy().view(np.uint32)[0]) == number % 2**32


def test_a_plain_table_is_read_without_the_modules_call() -> None:
    module = Module(6, torch.bfloat16, torch.float)
    embedding = Embedding(module)
    target = torch.zeros(6)
    embedding.fill([3], [target])
    assert module.num_calls == 0
    assert torch.equal(target, module.forward(torch.tensor([[3]]), {})[0, 0])


@pytest.mark.parametrize("facts", [{"normalize": True}, {"multiplier": 12.0}])
def test_an_embedding_that_does_more_than_look_up_is_called(facts: dict[str, Any]) -> None:
    module = Module(6, torch.half, torch.float, **facts)
    targets = [torch.zeros(6), torch.zeros(6)]
    Embedding(module).fill([3, 8], targets)
    assert module.num_calls == 1
    assert torch.equal(torch.stack(targets), module.forward(torch.tensor([[3], [8]]), {})[:, 0])
