"""A decode step of the simulated GPU, from its begin until its log is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.offers import Offers


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a running step reads and writes. table, heat: int32 (layers, experts), fixed while it runs.

    cpu_count, offers: of the two rules, likewise. log, kept: int32 (layers, rows * top_k), its picks and the
    slots that they took. Of the table, what the step itself has kept is changed.
    """

    table: NDArray[np.int32]
    heat: NDArray[np.int32]
    cpu_count: NDArray[np.int32]
    offers: Offers | None
    log: NDArray[np.int32]
    kept: NDArray[np.int32]
