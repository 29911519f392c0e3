"""The costs of a GPU's lanes and the table by which plans split a layer's misses, as the device has it."""

from __future__ import annotations

from dataclasses import replace

import torch

from glm53srv.errors import EngineError
from glm53srv.offload.calibrate import Calibration
from glm53srv.offload.cost import CostOverrides, Parts
from glm53srv.offload.cost_ledger import CostLedger
from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.device.options import OffloadOptions


class SplitTable:
    """Owns a ledger for each number of rows of a step, and sends its table when the device has another.

    Rows share launches, copies and the CPU's reads: an expert costs otherwise in a step of four than of one.
    Engine thread only. table: int32 (picks + 1, picks + 1) on the device, what plans read.
    """

    def __init__(
        self,
        options: OffloadOptions,
        num_parts: int,
        reader: HostReader,
        table: torch.Tensor,
        max_rows: int,
    ) -> None:
        """num_parts: of an expert. max_rows: of a step."""
        self._max_rows = max_rows
        self._options = options
        self._num_parts = num_parts
        self._reader = reader
        self._table = table
        self._ledgers: dict[int, CostLedger] = {}
        self._rows = self._rows_before = 1
        self._sent: tuple[int, int] | None = None  # whose table the device has, and which of them

    @property
    def ledger(self) -> CostLedger:
        """The costs of steps like the newest one. Raises EngineError before open()."""
        return self.of(self._rows)

    @property
    def ledger_before(self) -> CostLedger:
        """Those of steps like the one before the newest. Raises EngineError before open()."""
        return self.of(self._rows_before)

    def open(
        self,
        calibration: Calibration,
        costs: CostOverrides,
        *,
        has_workers: bool,
        num_landing: int,
        is_overlapped: bool,
    ) -> None:
        """Begin with these costs. has_workers: there is a CPU lane. num_landing: buffers for experts of the
        link, without which none is shared. is_overlapped: hits are computed beside the link's copies."""
        mode = self._options.mode if has_workers else "exact"
        max_picks = self._table.shape[0] - 1
        parts = self._parts(self._options.splits_experts, num_landing)
        calibration = replace(calibration, costs=replace(calibration.costs, is_overlapped=is_overlapped))
        # All of them now: a table takes some ms, which a step's begin has not.
        self._ledgers = {
            rows: CostLedger(calibration, costs, max_picks, mode, parts)
            for rows in range(1, self._max_rows + 1)
        }
        self._sent = None
        self.send()

    def begin_step(self, num_rows: int) -> None:
        """Begin a decode step of so many rows; before its first kernel."""
        self._rows_before, self._rows = self._rows, num_rows
        self.send()

    def share(self, is_wanted: bool, num_landing: int) -> None:
        """Share an expert of each layer between link and CPU from now on, or none."""
        for ledger in self._ledgers.values():
            ledger.share(self._parts(is_wanted, num_landing))
        self.send()

    def send(self) -> None:
        """Send the table of the newest step's rows if the device has another."""
        ledger = self.ledger
        wanted = (self._rows, ledger.num_tables)
        if wanted != self._sent:
            self._sent = wanted
            self._reader.send(ledger.table, self._table)

    def of(self, num_rows: int) -> CostLedger:
        """The costs of steps of so many rows. Raises EngineError before open()."""
        if not self._ledgers:
            raise EngineError("the offload was not started")
        return self._ledgers[num_rows]

    def _parts(self, is_shared: bool, num_landing: int) -> Parts:
        return Parts(self._num_parts, num_landing if is_shared else 0)
