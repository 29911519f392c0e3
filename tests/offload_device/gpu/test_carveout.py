"""What the driver is told of kernels that leave shared memory to others."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field

import pytest

from glm53srv.offload.device.gpu import carveout


@dataclass
class Driver:
    """Stands for libcuda."""

    status: int = 0
    told: list[tuple[int | None, int, int]] = field(default_factory=list)

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.told.append((function.value, attribute, value))
        return self.status


@dataclass
class Kernel:
    """What Triton's launch gives."""

    function: int


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(carveout, "_driver", lambda: fake)
    monkeypatch.setattr(carveout, "_preference", carveout._Preference())
    return fake


def test_each_kernel_is_told_of_once_and_again_when_something_else_is_wanted(driver: Driver) -> None:
    for launched in (Kernel(71), Kernel(72), Kernel(71)):
        carveout.leave_room(launched)
    assert driver.told == [(71, 9, 100), (72, 9, 100)]
    carveout.prefer(carveout.USUAL)
    carveout.leave_room(Kernel(71))
    assert driver.told[2:] == [(71, 9, -1)]


def test_the_interpreter_has_no_kernel_to_tell_of(driver: Driver) -> None:
    carveout.leave_room(None)
    assert driver.told == []


def test_a_driver_that_refuses_is_said_once(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.status = 1
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            carveout.leave_room(Kernel(5))
    assert [record.message for record in caplog.records] == [
        "the driver does not divide shared memory for kernels beside others: error 1"
    ]
