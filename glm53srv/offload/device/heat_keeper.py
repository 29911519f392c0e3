"""Keeps heat across restarts: read once at start, written now and then beside the steps, and at the end.

The file and what it holds: heat_file.py. Nothing here fails a server: a file that cannot be read or written
costs a warm start and is said once in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.heat_file import load_heat, save_heat
from glm53srv.offload.report import HeatReport

logger = logging.getLogger(__name__)

Heat = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeatOptions:
    """Where heat is kept. path: None keeps none. interval_s: time between two saves while steps run."""

    path: Path | None = None
    interval_s: float = 600.0


class HeatKeeper:
    """Owns the heat file of one running server. Called by the engine thread, between steps.

    executor: runs the saves that happen while steps run, one at a time; by default a thread of its own, which
    close() ends. A save takes a copy of the history (48 kB for GLM-5.3-Flash) and about 2 ms of that thread.
    """

    def __init__(
        self,
        options: HeatOptions,
        geometry: ExpertGeometry,
        fingerprint: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        self._options = options
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._clock = clock
        self._executor = executor
        self._owns_executor = executor is None
        self._saved_s = clock()
        self._is_dirty = False
        self._save: Future[None] | None = None
        self.is_warm = False
        self.num_saves = 0

    def load(self) -> Heat | None:
        """Give the history of an earlier run, or None, with a log line in either case."""
        path = self._options.path
        if path is None:
            logger.info("heat kept=no: the cache starts cold; name a file with GLM53_EC_HEAT")
            return None
        if not path.exists():
            logger.info("heat path=%s: no earlier run; the cache starts cold", path)
            return None
        found = load_heat(path, self._geometry, self._fingerprint)
        self.is_warm = found.heat is not None
        if found.heat is None:
            logger.warning("heat ignored: %s; the cache starts cold", found.reason)
        else:
            logger.info("heat path=%s experts=%d", path, np.count_nonzero(found.heat))
        return found.heat

    def end_step(self, history: Heat) -> None:
        """Note that a step was learnt from; save beside the steps when the interval is over."""
        self._is_dirty = True
        if self._options.path is None or self._clock() - self._saved_s < self._options.interval_s:
            return
        if self._save is not None and not self._save.done():
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="heat")
        self._saved_s = self._clock()
        self._is_dirty = False
        self._save = self._executor.submit(self._write, history.copy())

    def close(self, history: Heat) -> None:
        """Save what was learnt since the last save. Idempotent; a save under way is waited for."""
        if self._save is not None:
            self._save.result()
        if self._owns_executor and self._executor is not None:
            self._executor.shutdown()
        if self._options.path is not None and self._is_dirty:
            self._is_dirty = False
            self._write(history)

    def report(self) -> HeatReport:
        """Tell what /stats shows."""
        path = self._options.path
        return HeatReport(None if path is None else str(path), self.is_warm, self.num_saves)

    def _write(self, history: Heat) -> None:
        path = self._options.path
        assert path is not None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_heat(path, history, self._geometry, self._fingerprint)
        except OSError as error:
            logger.warning("heat not saved: %s", error)
        else:
            self.num_saves += 1
