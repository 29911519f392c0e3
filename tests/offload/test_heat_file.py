"""Heat survives a restart, or is ignored with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.heat_file import load_heat, save_heat
from glm53srv.offload.residency import ResidencyPolicy
from tests.offload.builders import SMALL, build_replay, random_picks


def some_heat() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(1).random(SMALL.num_keys, dtype=np.float32)


def test_saved_heat_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_heat(tmp_path / "heat.npz", some_heat(), SMALL, "model-a")
    found = load_heat(tmp_path / "heat.npz", SMALL, "model-a")
    assert found.reason is None
    assert found.heat is not None
    assert found.heat.tobytes() == some_heat().tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["heat.npz"]


def test_heat_of_another_checkpoint_is_ignored(tmp_path: Path) -> None:
    save_heat(tmp_path / "heat.npz", some_heat(), SMALL, "model-a")
    found = load_heat(tmp_path / "heat.npz", SMALL, "model-b")
    assert found.heat is None
    assert found.reason is not None
    assert "another checkpoint" in found.reason


def test_heat_of_another_shape_is_ignored(tmp_path: Path) -> None:
    save_heat(tmp_path / "heat.npz", some_heat(), SMALL, "model-a")
    found = load_heat(tmp_path / "heat.npz", ExpertGeometry(4, 25, 4, 100), "model-a")
    assert found.heat is None
    assert "need float32 (4, 25)" in (found.reason or "")


def test_heat_of_another_version_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "heat.npz"
    heat = some_heat().reshape(4, 24)
    np.savez(path, version=np.int64(2), fingerprint=np.str_("model-a"), heat=heat)
    assert "version 2" in (load_heat(path, SMALL, "model-a").reason or "")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not a zip file at all"])
def test_a_broken_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "heat.npz"
    path.write_bytes(content)
    found = load_heat(path, SMALL, "model-a")
    assert found.heat is None
    assert str(path) in (found.reason or "")


def test_an_array_that_is_no_archive_is_ignored(tmp_path: Path) -> None:
    np.save(tmp_path / "heat.npy", some_heat())
    assert "not a heat file" in (load_heat(tmp_path / "heat.npy", SMALL, "model-a").reason or "")


def test_a_truncated_file_is_ignored_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "heat.npz"
    save_heat(path, some_heat(), SMALL, "model-a")
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert load_heat(path, SMALL, "model-a").heat is None


def test_values_that_are_no_heat_are_ignored(tmp_path: Path) -> None:
    heat = some_heat()
    heat[7] = np.nan
    save_heat(tmp_path / "heat.npz", heat, SMALL, "model-a")
    assert "outside" in (load_heat(tmp_path / "heat.npz", SMALL, "model-a").reason or "")


def test_a_missing_file_is_a_cold_start(tmp_path: Path) -> None:
    assert "no heat" in (load_heat(tmp_path / "heat.npz", SMALL, "model-a").reason or "")


def test_a_warm_start_holds_the_experts_that_were_hot(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    first = build_replay()
    for _ in range(200):
        first.step(random_picks(rng), 1)
    save_heat(tmp_path / "heat.npz", first.policy.history, SMALL, "model-a")
    found = load_heat(tmp_path / "heat.npz", SMALL, "model-a")
    assert found.heat is not None

    second = build_replay()
    second.policy.warm_start(found.heat)
    second.fill()

    resident = np.flatnonzero(second.policy.table().ravel() >= 0)
    hottest = np.argsort(-found.heat, kind="stable")[: len(resident)]
    assert len(resident) == second.policy.num_slots
    assert set(resident.tolist()) == set(hottest.tolist())


def test_warm_start_refuses_heat_of_another_shape() -> None:
    with pytest.raises(ValueError):
        ResidencyPolicy(SMALL, 8).warm_start(np.zeros(5, np.float32))
