"""An offload at its start and end: costs are measured, heat is kept and fills the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.kernels import KernelPool
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import load_model_config
from glm53srv.model.fingerprint import routing_fingerprint
from glm53srv.model.linear import KernelContext
from glm53srv.model.pack import pack_random_model
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.heat_keeper import HeatOptions
from glm53srv.offload.device.layout import sparse_layers
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.simulated_gpu import SimulatedOffload
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.heat_file import load_heat, save_heat
from glm53srv.offload.report import OffloadReport
from glm53srv.offload.vram_plan import VramOptions
from tests.engine.plans import Driver, Stream
from tests.offload_device.conftest import Model

NUM_SLOTS = 48
OPTIONS = OffloadOptions(
    costs=CostOverrides(0.0, 0.4, 0.4),
    vram=VramOptions(max_slots=NUM_SLOTS),
    chunk_slots=4,
    copies_per_step=2,
    calibrate_s=0.0,
    deadline_ms=60_000,
)


@contextmanager
def engine_of(model_dir: Path, offload: OffloadOptions) -> Iterator[CpuEngine]:
    engine = CpuEngine.load(model_dir, EngineOptions(cache_tokens=1024, max_chunk_tokens=64, offload=offload))
    try:
        yield engine
    finally:
        engine.close()


def report_of(engine: CpuEngine) -> OffloadReport:
    report = engine.offload_report
    assert report is not None
    return report


def talk(engine: CpuEngine, num_tokens: int) -> OffloadReport:
    """Hold the one conversation of these tests, and give what the offload says of it."""
    driver = Driver(engine)
    ids = np.random.default_rng(7).integers(256, 2256, 20)
    stream = Stream(0, tuple(int(token) for token in ids), (0,))
    driver.prefill(stream)
    driver.decode([stream], num_tokens)
    driver.release([stream])
    return report_of(engine)


def with_heat(path: Path | None) -> OffloadOptions:
    return replace(OPTIONS, heat=HeatOptions(path))


def test_a_restart_serves_more_from_the_cache_than_a_cold_start(
    random_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "heat.npz"
    with engine_of(random_model_dir, with_heat(path)) as engine:
        cold = talk(engine, 30)
        talk(engine, 100)
    with caplog.at_level(logging.INFO, "glm53srv"), engine_of(random_model_dir, with_heat(path)) as engine:
        at_start = report_of(engine)
        warm = talk(engine, 30)
    assert (at_start.num_resident, at_start.counts.num_steps) == (NUM_SLOTS, 0)  # before the first request
    assert at_start.heat.is_warm
    assert not cold.heat.is_warm
    assert f"offload warm slots={NUM_SLOTS} of {NUM_SLOTS}" in caplog.text
    assert cold.hit_share is not None
    assert warm.hit_share is not None
    assert warm.hit_share > cold.hit_share + 0.1


def test_a_warm_start_changes_no_token(random_model_dir: Path, tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        with engine_of(random_model_dir, with_heat(tmp_path / "heat.npz")) as engine:
            driver, stream = Driver(engine), Stream(0, tuple(range(300, 330)), (0,))
            driver.prefill(stream)
            driver.decode([stream], 40)
            outputs.append(stream.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["broken", "foreign"])
def test_heat_that_does_not_fit_is_a_cold_start_and_then_replaced(
    random_model_dir: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "heat.npz"
    geometry = ExpertGeometry(7, 32, 4, 1)
    if kind == "broken":
        path.write_bytes(b"PK\x03\x04 and no more")
    else:
        save_heat(path, np.full(geometry.num_keys, 0.5, np.float32), geometry, "another checkpoint")
    with engine_of(random_model_dir, with_heat(path)) as engine:
        assert (report_of(engine).num_resident, report_of(engine).heat.is_warm) == (0, False)
        talk(engine, 5)
    assert "heat ignored" in caplog.text
    config = load_model_config(random_model_dir)
    mark = routing_fingerprint(Checkpoint(random_model_dir), config, sparse_layers(config))
    found = load_heat(path, geometry, mark)
    assert found.heat is not None
    assert found.heat.any()


def test_a_start_without_requests_writes_nothing(random_model_dir: Path, tmp_path: Path) -> None:
    with engine_of(random_model_dir, with_heat(tmp_path / "heat.npz")) as engine:
        engine.warm_up()
    assert list(tmp_path.iterdir()) == []


def test_costs_are_measured_at_start_within_a_second_and_corrected(
    random_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(OPTIONS, costs=CostOverrides(), calibrate_s=1.0, copies_per_step=None)
    with caplog.at_level(logging.INFO, "glm53srv"), engine_of(random_model_dir, options) as engine:
        start = report_of(engine).costs
        report = talk(engine, 80)
    assert dict.fromkeys(start.sources.values()) == {"measured": None}, start.notes
    assert start.num_samples >= 8
    assert start.elapsed_s < 2.0  # of a busy machine; the bound itself is tested on a clock
    assert start.copy_gb_s is not None
    # Of one lane at least: a machine may be so busy at the start that the workers get no expert afterwards.
    before, after = start.now, report.costs.now
    assert (after.cpu_expert_ms, after.zero_copy_ms) != (before.cpu_expert_ms, before.zero_copy_ms)
    assert report.costs.at_start == start.at_start
    assert "cpu_expert_ms=" in caplog.text
    assert "(measured)" in caplog.text
    assert "copy_gb_s=" in caplog.text
    assert report.counts.num_copies > 0


def test_calibration_leaves_no_trace_in_cache_and_counts(random_model_dir: Path) -> None:
    options = replace(OPTIONS, costs=CostOverrides(), calibrate_s=0.2)
    with engine_of(random_model_dir, options) as engine:
        report = report_of(engine)
        assert (report.num_resident, report.hit_share) == (0, None)
        assert set(counts_of(report)) == {0}


def counts_of(report: OffloadReport) -> list[int]:
    return [getattr(report.counts, name) for name in report.counts.__slots__]


def test_costs_that_the_user_set_are_not_touched(random_model_dir: Path) -> None:
    options = replace(OPTIONS, calibrate_s=0.2)
    with engine_of(random_model_dir, options) as engine:
        costs = talk(engine, 80).costs
    assert (costs.now.cpu_fixed_ms, costs.now.cpu_expert_ms, costs.now.zero_copy_ms) == (0.0, 0.4, 0.4)
    assert costs.sources["cpu_expert_ms"] == "set"


def test_a_start_that_fails_leaves_no_thread_behind(arena: ExpertArena, model: Model) -> None:
    def broken() -> float:
        raise RuntimeError("no clock")

    num_threads = len(os.listdir("/proc/self/task"))
    options = replace(OPTIONS, calibrate_s=1.0, costs=CostOverrides(), crew_threads=2)
    with KernelPool(1) as pool, pytest.raises(RuntimeError, match="no clock"):
        SimulatedOffload(KernelContext(pool), model.config, arena, 4, options, clock=broken)
    assert len(os.listdir("/proc/self/task")) == num_threads


def test_experts_in_place_have_nothing_to_tell(random_model_dir: Path) -> None:
    engine = CpuEngine.load(random_model_dir, EngineOptions(cache_tokens=1024))
    assert engine.offload_report is None
    engine.close()


def test_fingerprints_tell_routers_apart(random_model_dir: Path, tmp_path: Path) -> None:
    pack_random_model(tmp_path / "other", seed=5)
    config = load_model_config(random_model_dir)
    layers = sparse_layers(config)
    one = routing_fingerprint(Checkpoint(random_model_dir), config, layers)
    assert one == routing_fingerprint(Checkpoint(random_model_dir), config, layers)
    assert one != routing_fingerprint(Checkpoint(tmp_path / "other"), config, layers)
