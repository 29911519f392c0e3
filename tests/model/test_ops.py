"""Element-wise operations at the ends of float32."""

from __future__ import annotations

import numpy as np

from glm53srv.model.norm import LayerNorm
from glm53srv.model.ops import sigmoid, softmax, unit_length


def test_sigmoid_is_precise_and_never_overflows() -> None:
    x = np.array([-np.inf, -1e30, -200, -80, -20, -1, 0, 1, 20, 1e30, np.inf], np.float32)
    expected = 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))
    assert np.allclose(sigmoid(x), expected, rtol=1e-6, atol=2e-38)


def test_softmax_leaves_masked_entries_out() -> None:
    weights = softmax(np.array([[1000.0, -np.inf, 1000.0]], np.float32))
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


def test_rows_of_zeros_stay_finite() -> None:
    zeros = np.zeros((2, 8), np.float32)
    assert not unit_length(zeros).any()
    norm = LayerNorm(np.ones(8, np.float32), np.full(8, 0.5, np.float32), 1e-6)
    assert (norm(zeros) == 0.5).all()
