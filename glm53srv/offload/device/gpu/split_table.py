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
    """Owns the ledger, and sends its table when that was remade. Engine thread only.

    table: int32 (picks + 1, picks + 1) on the device, what plans read.
    """

    def __init__(
        self, options: OffloadOptions, num_parts: int, reader: HostReader, table: torch.Tensor
    ) -> None:
        self._options = options
        self._num_parts = num_parts
        self._reader = reader
        self._table = table
        self._num_sent = 0
        self._ledger: CostLedger | None = None

    @property
    def ledger(self) -> CostLedger:
        """The costs now. Raises EngineError before open()."""
        if self._ledger is None:
            raise EngineError("the offload was not started")
        return self._ledger

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
        self._ledger = CostLedger(calibration, costs, max_picks, mode, parts)
        self._num_sent = 0
        self.send()

    def share(self, is_wanted: bool, num_landing: int) -> None:
        """Share an expert of each layer between link and CPU from now on, or none."""
        self.ledger.share(self._parts(is_wanted, num_landing))
        self.send()

    def send(self) -> None:
        """Send the table if it was remade."""
        ledger = self.ledger
        if ledger.num_tables != self._num_sent:
            self._num_sent = ledger.num_tables
            self._reader.send(ledger.table, self._table)

    def _parts(self, is_shared: bool, num_landing: int) -> Parts:
        return Parts(self._num_parts, num_landing if is_shared else 0)
