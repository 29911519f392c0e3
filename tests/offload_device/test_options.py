"""From the command line to an engine with an offload."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from glm53srv.config import Config, load_config
from glm53srv.engine.factory import load_engine
from glm53srv.errors import ConfigError
from glm53srv.machine import read_machine

ENVIRONMENT = {
    "GLM53_OFFLOAD": "simulate",
    "GLM53_CT_CPUS": str(min(os.sched_getaffinity(0))),
    "GLM53_CT_THREADS": "2",
    "GLM53_CT_A": "0.05",
    "GLM53_CT_B": "0.4",
    "GLM53_CT_TZC": "0.4",
    "GLM53_CT_SWZ": "1",
    "GLM53_EC_MAX_SLOTS": "16",
    "GLM53_EC_STAGE_GB": "1.5",
    "GLM53_EC_ELASTIC_GB": "4",
    "GLM53_EC_RESERVE_GB": "0",
    "GLM53_EC_HEAT": "/tmp/nowhere/heat.npz",
    "GLM53_EC_HEAT_MINUTES": "2.5",
}


def configure(model_dir: Path, environ: dict[str, str]) -> Config:
    return load_config(["--model", str(model_dir), "--cache-tokens", "1024", "--threads", "1"], environ)


def test_every_variable_reaches_the_configuration(random_model_dir: Path) -> None:
    offload = configure(random_model_dir, ENVIRONMENT).engine.offload
    assert (offload.kind, offload.ct_threads, offload.max_slots) == ("simulate", 2, 16)
    assert (offload.ct_a_ms, offload.ct_b_ms, offload.ct_tzc_ms) == (0.05, 0.4, 0.4)
    assert (offload.stage_gib, offload.elastic_gib, offload.reserve_gib) == (1.5, 4.0, 0.0)
    assert (offload.heat_path, offload.heat_interval_s) == (Path("/tmp/nowhere/heat.npz"), 150.0)
    assert (offload.ct_cpus, offload.ct_swz) == (ENVIRONMENT["GLM53_CT_CPUS"], "1")


def test_defaults_are_those_of_the_original_variables(random_model_dir: Path) -> None:
    offload = configure(random_model_dir, {}).engine.offload
    assert (offload.kind, offload.ct_cpus, offload.ct_threads) == ("off", "auto", None)
    assert (offload.stage_gib, offload.elastic_gib, offload.reserve_gib) == (2.6, 12.0, None)
    assert (offload.heat_path, offload.heat_interval_s) == (None, 600.0)


def test_engine_with_an_offload_loads_and_says_what_is_ignored(
    random_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(random_model_dir, ENVIRONMENT).engine
    seen: list[tuple[float, str]] = []
    with caplog.at_level(logging.INFO, "glm53srv"):
        engine = load_engine(config, read_machine(), lambda part, stage: seen.append((part, stage)))
    engine.close()
    assert "GLM53_CT_SWZ=1 is ignored" in caplog.text
    assert "offload kind=simulate" in caplog.text
    assert "threads=2" in caplog.text
    assert any("GB/s" in stage for _, stage in seen)
    assert [part for part, _ in seen] == sorted(part for part, _ in seen), seen[:12]


def test_swizzle_is_answered_without_an_offload_too(
    random_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(random_model_dir, {"GLM53_CT_SWZ": "0"}).engine
    with caplog.at_level(logging.INFO, "glm53srv"):
        load_engine(config, read_machine(), lambda part, stage: None).close()
    assert "GLM53_CT_SWZ=0 is ignored" in caplog.text


def test_cpus_that_are_not_ours_are_refused(random_model_dir: Path) -> None:
    config = configure(random_model_dir, {**ENVIRONMENT, "GLM53_CT_CPUS": "60000"}).engine
    with pytest.raises(ConfigError, match="names CPU 60000"):
        load_engine(config, read_machine(), lambda part, stage: None)
