"""Pins on Triton's own autotuners, under its interpreter, with a timer that says that the last is best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from glm53srv.engine.cuda.pins import Pin, find_autotuners, forget_choices, pin_autotuners, read_choices
from tests.engine.cuda.with_torch import tuned_kernels
from tests.engine.cuda.with_torch.tuned_kernels import CONFIGS, TIMED, run_double, run_square

LAST = Pin((("block", 32),), 4, 2)


@pytest.fixture
def tuners() -> Iterator[dict[str, Any]]:
    """The autotuners, as they were imported."""
    found = find_autotuners(tuned_kernels, Autotuner)
    kept = {name: tuner.configs for name, tuner in found.items()}
    forget_choices(found)
    TIMED.clear()
    yield found
    for name, tuner in found.items():
        tuner.configs = kept[name]


def check_results() -> None:
    for count in (5, 40):
        numbers = torch.arange(count, dtype=torch.float32)
        assert torch.equal(run_square(count), numbers * numbers)
        assert torch.equal(run_double(count), numbers * (3 if count % 2 else 2))


def test_autotuners_are_found_also_under_heuristics(tuners: dict[str, Any]) -> None:
    assert set(tuners) == {"square_kernel", "double_kernel"}
    assert isinstance(tuned_kernels.square_kernel, Autotuner)
    assert not isinstance(tuned_kernels.double_kernel, Autotuner)


def test_what_was_timed_is_read(tuners: dict[str, Any]) -> None:
    check_results()
    assert len(TIMED) == 2 * 2 * len(CONFIGS)  # kernels, values of the key
    assert read_choices(tuners) == {"square_kernel": LAST, "double_kernel": LAST}


def test_a_pinned_kernel_is_not_timed_and_runs_as_pinned(tuners: dict[str, Any]) -> None:
    pins = {"square_kernel": Pin((("block", 16),), 4, 2), "double_kernel": Pin((("block", 64),), 8, 1)}
    report = pin_autotuners(tuners, pins, triton.Config)
    assert report.built == ("double_kernel",)
    check_results()
    assert TIMED == []
    assert {name: Pin.of(tuner.best_config) for name, tuner in tuners.items()} == pins


def test_without_a_pin_the_first_configuration_runs(tuners: dict[str, Any]) -> None:
    pin_autotuners(tuners, {}, triton.Config)
    check_results()
    assert TIMED == []
    assert all(tuner.best_config is CONFIGS[0] for tuner in tuners.values())
    assert read_choices(tuners) == {}  # nothing was chosen
