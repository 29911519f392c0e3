"""What logits an engine gave, and how far one set of them is from another; without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

MEAN_KL, P99_KL, TOP1 = 0.002, 0.03, 0.99
"""Targets of fast mode against exact mode."""


@contextlib.contextmanager
def recording(model: Any, found: list[Logits]) -> Iterator[None]:
    """Append what decode steps of a CudaModel give to found, a float32 (rows, vocabulary) for each."""
    usual = model.to_host

    def to_host(sent: Any) -> Logits:
        rows: Logits = usual(sent)
        found.append(rows.copy())  # borrowed until the next step
        return rows

    model.to_host = to_host
    try:
        yield
    finally:
        model.to_host = usual


def difference(ours: Logits, stock: Logits) -> float:
    """Largest absolute difference; NaN for shapes that differ, and where either holds what is no number."""
    if ours.shape != stock.shape or not (np.isfinite(ours).all() and np.isfinite(stock).all()):
        return float("nan")
    return float(np.abs(ours - stock).max(initial=0.0))


def worst_of(*differences: float) -> float:
    """Largest of some differences, NaN if one is: Python's max passes over a NaN that is not the first."""
    return float(np.max(differences))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of paired positions: KL(exact || fast) in nats, and how often both have the same most likely token."""

    num_positions: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1: float

    @property
    def is_good(self) -> bool:
        """Whether the targets are met; NaN meets none."""
        return self.mean_kl <= MEAN_KL and self.p99_kl <= P99_KL and self.top1 >= TOP1

    def __str__(self) -> str:
        return (
            f"{self.num_positions} positions: mean KL {self.mean_kl:.2e}, p99 {self.p99_kl:.2e}, "
            f"max {self.max_kl:.2e}, top-1 {self.top1:.4f}"
        )


def agreement(exact: Logits, fast: Logits) -> Agreement:
    """Compare logits, float (positions, vocabulary) each. Raises ValueError for other shapes."""
    if exact.shape != fast.shape or exact.ndim != 2 or not len(exact):
        raise ValueError(f"logits of shapes {exact.shape} and {fast.shape} cannot be compared")
    log_p, log_q = _log_softmax(exact), _log_softmax(fast)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(1)
    return Agreement(
        len(kl),
        float(kl.mean()),
        float(np.quantile(kl, 0.99)),
        float(kl.max()),
        float((exact.argmax(1) == fast.argmax(1)).mean()),
    )


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted: NDArray[np.float64] = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
    return shifted
