"""Each number of rows has its own costs and table; the device has that of the newest step's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from glm53srv.errors import EngineError
from glm53srv.offload.calibrate import Calibration
from glm53srv.offload.cost import CostModel, CostOverrides
from glm53srv.offload.cost_ledger import EARLY_REFRESH_STEPS
from glm53srv.offload.device.gpu.split_table import SplitTable
from glm53srv.offload.device.options import OffloadOptions

COSTS = CostModel(
    cpu_fixed_ms=0.05, cpu_expert_ms=0.16, zero_copy_ms=0.2, vram_expert_ms=0.015, gpu_fixed_ms=0.1
)
MAX_PICKS = 16


class Reader:
    """Copies at once, and counts."""

    def __init__(self) -> None:
        self.num_sent = 0

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        self.num_sent += 1
        target.copy_(torch.from_numpy(array))


def make_table(*, has_workers: bool = True, shares: bool = True) -> tuple[SplitTable, Reader, torch.Tensor]:
    reader, table = Reader(), torch.zeros((MAX_PICKS + 1, MAX_PICKS + 1), dtype=torch.int32)
    options = OffloadOptions(mode="fast", splits_experts=shares)
    made = SplitTable(options, 16, reader, table, 4)  # type: ignore[arg-type]
    made.open(
        Calibration(COSTS), CostOverrides(), has_workers=has_workers, num_landing=16, is_overlapped=True
    )
    return made, reader, table


def run(made: SplitTable, num_rows: int, expert_ms: float, steps: int) -> None:
    for _ in range(steps):
        made.begin_step(num_rows)
        ledger: Any = made.ledger_before
        ledger.observe_cpu([(num, 0.05 + num * expert_ms) for num in (1, 2, 3) for _ in range(14)])
        ledger.observe_gpu([(4, num, 0.1 + 0.2 * num) for num in (1, 2, 3) for _ in range(14)])
        ledger.end_step()
        made.send()


def test_what_steps_of_several_rows_cost_moves_no_table_of_one() -> None:
    made, reader, table = make_table()
    run(made, 1, 0.16, 1)
    first, num_sent = table.clone(), reader.num_sent
    run(made, 4, 0.9, 8 * EARLY_REFRESH_STEPS)
    assert made.ledger.costs.cpu_expert_ms > 0.5
    assert int(table.sum()) < int(first.sum())
    assert reader.num_sent > num_sent
    run(made, 1, 0.16, 3)
    assert torch.equal(table, first)
    assert made.ledger.costs.cpu_expert_ms == pytest.approx(0.16, rel=0.05)


def test_a_steps_log_counts_for_its_own_rows() -> None:
    """It is read when the next one has begun."""
    made, _, _ = make_table()
    made.begin_step(4)
    made.begin_step(1)
    assert made.ledger_before is not made.ledger
    made.begin_step(1)
    assert made.ledger_before is made.ledger


def test_a_table_is_sent_when_the_device_has_another() -> None:
    made, reader, _ = make_table()
    for num_rows, num_sent in ((1, 1), (1, 1), (2, 2), (2, 2), (1, 3)):
        made.begin_step(num_rows)
        made.send()
        assert reader.num_sent == num_sent


def test_sharing_is_changed_for_all_rows() -> None:
    made, _, table = make_table()
    made.begin_step(2)
    assert bool((table % 16 > 0).any())
    made.share(False, 16)
    for num_rows in (2, 1, 4):
        made.begin_step(num_rows)
        assert bool(table.any())
        assert not bool((table % 16 > 0).any())


def test_without_workers_the_cpu_gets_nothing_and_before_the_start_there_are_no_costs() -> None:
    made, _, table = make_table(has_workers=False)
    made.begin_step(2)
    assert not bool(table.any())
    unopened = SplitTable(OffloadOptions(mode="fast"), 16, Reader(), table, 4)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="not started"):
        unopened.send()
