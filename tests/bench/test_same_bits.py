"""What bench.kernels --check compares, and that it tells a difference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.same_bits import ROWS, SHAPES, compare_bits
from glm53srv.kernels import Exl3Matrix, KernelPool, Precision


class WrongPool(KernelPool):
    """Errs by one unit in the last place in one element, when five rows are multiplied."""

    def linear(
        self, x: NDArray[np.float32], matrix: Exl3Matrix, precision: Precision = Precision.EXACT32
    ) -> NDArray[np.float32]:
        y = super().linear(x, matrix, precision)
        if len(x) == 5:
            y[3, 7] = np.nextafter(y[3, 7], np.float32(np.inf))
        return y


def test_pools_of_one_instruction_set_agree() -> None:
    with KernelPool(1) as one, KernelPool(2) as two:
        num_products, wrong = compare_bits([one, two], 3)
    assert num_products == len(SHAPES) * len(ROWS) + 4
    assert wrong == []


def test_one_wrong_bit_is_told_with_the_product_and_the_instruction_set() -> None:
    with KernelPool(2) as right, WrongPool(2) as wrong_pool:
        _, wrong = compare_bits([right, wrong_pool], 3)
    assert wrong == [f"{right.isa.name}: {width} x {out} times 5" for width, out in SHAPES]
