"""The watchdog of the device, with a clock that the test moves."""

from __future__ import annotations

import logging

import pytest

from glm53srv.engine.cuda.watchdog import DeviceWatchdog


class Scene:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.ends = 0
        self.watchdog = DeviceWatchdog(10.0, clock=lambda: self.now_s, on_hang=self._end, starts_thread=False)

    def _end(self) -> None:
        self.ends += 1

    def at(self, now_s: float) -> int:
        self.now_s = now_s
        self.watchdog.look()
        return self.ends


def test_a_wait_that_lasts_ends_the_process_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.watchdog.begin("step 7")
    assert scene.at(9.9) == 0
    with caplog.at_level(logging.CRITICAL):
        assert scene.at(10.0) == 1
    assert scene.at(30.0) == 1
    assert "did not finish step 7 within 10 s" in caplog.text


def test_a_wait_that_ended_counts_no_longer() -> None:
    scene = Scene()
    scene.watchdog.begin("step 1")
    scene.watchdog.end()
    assert scene.at(100.0) == 0
    scene.watchdog.begin("step 2")
    assert scene.at(105.0) == 0
    assert scene.at(110.0) == 1


def test_its_thread_looks_by_itself_and_can_be_closed() -> None:
    seen: list[str] = []
    watchdog = DeviceWatchdog(0.0, on_hang=lambda: seen.append("hang"), starts_thread=False)
    watchdog.begin("a step")
    watchdog.close()
    watchdog._watch()
    assert seen == []
