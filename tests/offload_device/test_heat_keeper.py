"""The heat file of a running server: when it is written, and that its faults hurt nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53srv.offload.device.heat_keeper import Heat, HeatKeeper, HeatOptions
from glm53srv.offload.heat_file import load_heat, save_heat
from tests.offload.builders import SMALL


def heat_of(value: float) -> Heat:
    return np.full(SMALL.num_keys, value, np.float32)


class Inline(Executor):
    """Runs work when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        for future, work in self.waiting:
            future.set_result(work())
        self.waiting.clear()


class Desk:
    """A keeper on a clock of the test's, with its file."""

    def __init__(self, path: Path | None, interval_s: float = 60.0, mark: str = "model-a") -> None:
        self.now_s = 0.0
        self.path = path
        self.executor = Inline()
        options = HeatOptions(path, interval_s)
        self.keeper = HeatKeeper(options, SMALL, mark, clock=lambda: self.now_s, executor=self.executor)

    def saved(self) -> float | None:
        """Give the value in the file, None without a file."""
        assert self.path is not None
        found = load_heat(self.path, SMALL, "model-a").heat
        return None if found is None else float(found[0])


def test_heat_is_saved_when_the_interval_is_over_and_not_before(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "heat.npz")
    desk.now_s = 59.0
    desk.keeper.end_step(heat_of(0.1))
    assert desk.executor.waiting == []
    desk.now_s = 60.0
    desk.keeper.end_step(heat_of(0.2))
    desk.executor.run()
    assert desk.saved() == pytest.approx(0.2)
    desk.now_s = 119.0
    desk.keeper.end_step(heat_of(0.3))
    assert desk.executor.waiting == []
    assert desk.keeper.report().num_saves == 1


def test_a_save_holds_the_heat_of_its_moment(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "heat.npz")
    history = heat_of(0.2)
    desk.now_s = 60.0
    desk.keeper.end_step(history)
    history[:] = 0.9  # the steps go on while the thread writes
    desk.executor.run()
    assert desk.saved() == pytest.approx(0.2)


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "heat.npz")
    for minute in (1, 2, 3):
        desk.now_s = 60.0 * minute
        desk.keeper.end_step(heat_of(0.1 * minute))
    assert len(desk.executor.waiting) == 1
    desk.executor.run()
    desk.keeper.end_step(heat_of(0.4))
    desk.executor.run()
    assert desk.saved() == pytest.approx(0.4)


def test_the_end_saves_what_was_learnt_since(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "new" / "folder" / "heat.npz")
    desk.keeper.end_step(heat_of(0.5))
    desk.keeper.close(heat_of(0.6))
    assert desk.saved() == pytest.approx(0.6)
    desk.keeper.close(heat_of(0.7))
    assert desk.saved() == pytest.approx(0.6)  # idempotent


def test_a_run_without_a_step_leaves_the_file_alone(tmp_path: Path) -> None:
    save_heat(tmp_path / "heat.npz", heat_of(0.3), SMALL, "model-a")
    desk = Desk(tmp_path / "heat.npz")
    desk.keeper.load()
    desk.keeper.close(heat_of(0.0))
    assert desk.saved() == pytest.approx(0.3)


def test_heat_of_an_earlier_run_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_heat(tmp_path / "heat.npz", heat_of(0.3), SMALL, "model-a")
    desk = Desk(tmp_path / "heat.npz")
    with caplog.at_level(logging.INFO, "glm53srv"):
        found = desk.keeper.load()
    assert found is not None
    assert found.tolist() == heat_of(0.3).tolist()
    assert desk.keeper.report().is_warm
    assert f"experts={SMALL.num_keys}" in caplog.text


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"no archive"])
def test_a_broken_file_is_a_cold_start_with_a_log_line_and_is_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "heat.npz").write_bytes(content)
    desk = Desk(tmp_path / "heat.npz")
    assert desk.keeper.load() is None
    assert "heat ignored" in caplog.text
    desk.keeper.end_step(heat_of(0.5))
    desk.keeper.close(heat_of(0.5))
    assert desk.saved() == pytest.approx(0.5)


def test_heat_of_another_model_is_ignored_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_heat(tmp_path / "heat.npz", heat_of(0.3), SMALL, "model-b")
    desk = Desk(tmp_path / "heat.npz")
    assert desk.keeper.load() is None
    assert "written for another checkpoint" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    desk = Desk(tmp_path / "file" / "heat.npz")
    desk.keeper.end_step(heat_of(0.5))
    desk.keeper.close(heat_of(0.5))
    assert "heat not saved" in caplog.text
    assert desk.keeper.report().num_saves == 0


def test_a_first_run_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "glm53srv"):
        assert Desk(tmp_path / "heat.npz").keeper.load() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no earlier run" in caplog.text


def test_without_a_path_nothing_is_kept(tmp_path: Path) -> None:
    desk = Desk(None)
    assert desk.keeper.load() is None
    desk.now_s = 1e6
    desk.keeper.end_step(heat_of(0.5))
    desk.keeper.close(heat_of(0.5))
    assert desk.executor.waiting == []
    assert list(tmp_path.iterdir()) == []


def test_a_thread_of_its_own_writes_and_ends(tmp_path: Path) -> None:
    clock = iter([0.0, 60.0, 60.0, 60.0])
    options = HeatOptions(tmp_path / "heat.npz", 60.0)
    keeper = HeatKeeper(options, SMALL, "model-a", clock=lambda: next(clock))
    keeper.end_step(heat_of(0.25))
    keeper.close(heat_of(0.9))  # waits for the save under way, and has nothing to add
    found = load_heat(tmp_path / "heat.npz", SMALL, "model-a").heat
    assert found is not None
    assert found[0] == 0.25
