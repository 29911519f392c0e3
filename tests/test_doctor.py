"""Findings on laid-out machines: what is fatal, what only costs speed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from glm53srv.config import Config, load_config
from glm53srv.doctor.examine import examine, require_servable
from glm53srv.doctor.findings import Severity, as_json, report
from glm53srv.engine.factory import choose_engine
from glm53srv.errors import CheckpointError, ConfigError, MachineError
from glm53srv.probe import LocalProbe
from tests.pretended_machine import GPU_VERSIONS, PretendedProbe, this_machine


def config_for(model_dir: Path, *arguments: str) -> Config:
    return load_config(["--model", str(model_dir), "--port", "0", *arguments], {})


def machine(**changes: object) -> PretendedProbe:
    return PretendedProbe(this_machine(**changes))


def severities(config: Config, probe: PretendedProbe) -> dict[str, Severity]:
    return {finding.name: finding.severity for finding in examine(config, probe)}


def test_this_machine_can_serve_the_random_model(random_model_dir: Path) -> None:
    config = config_for(random_model_dir)
    findings = examine(config, LocalProbe())
    assert as_json(findings)["ok"] is True
    assert "speaks nonsense" in report(findings)
    require_servable(config, LocalProbe())


def test_too_little_memory_is_fatal_and_says_what_is_needed(random_model_dir: Path) -> None:
    facts = machine(available_bytes=2**20, limit_bytes=None)
    assert severities(config_for(random_model_dir), facts)["memory"] is Severity.FATAL
    with pytest.raises(MachineError, match=r"too little memory: .* GiB, usable 0.0; free some, add some"):
        require_servable(config_for(random_model_dir), facts)


def test_a_control_group_limit_counts(random_model_dir: Path) -> None:
    facts = machine(available_bytes=2**40, limit_bytes=2**20)
    with pytest.raises(MachineError, match="control group limit"):
        require_servable(config_for(random_model_dir), facts)


def test_a_missing_checkpoint_is_fatal(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        require_servable(config_for(tmp_path / "none"), LocalProbe())


def test_a_taken_port_is_fatal_and_names_the_flag(random_model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = config_for(random_model_dir, "--port", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"cannot listen on .* choose with --port"):
            require_servable(config, LocalProbe())


def test_a_gpu_that_is_not_used_is_a_warning_with_the_reason(random_model_dir: Path) -> None:
    facts = machine(nvidia_devices=("NVIDIA GeForce RTX 3090",))
    config = config_for(random_model_dir)
    assert severities(config, facts)["engine"] is Severity.WARNING
    assert "RTX 3090 is not used" in choose_engine(config.engine, facts.facts()).reason


def test_asking_for_cuda_without_a_gpu_is_refused(random_model_dir: Path) -> None:
    with pytest.raises(MachineError, match="--engine cuda: no NVIDIA GPU was found"):
        require_servable(config_for(random_model_dir, "--engine", "cuda"), machine(nvidia_devices=()))


def test_a_gpu_with_its_packages_is_chosen(random_model_dir: Path) -> None:
    facts = machine(nvidia_devices=("NVIDIA GeForce RTX 3090",)).facts()
    config = config_for(random_model_dir).engine
    assert choose_engine(config, facts, GPU_VERSIONS.get).name == "cuda"
    older = {**GPU_VERSIONS, "exllamav3": "1.4.6"}
    assert "exllamav3 is 1.4.6, not 1.5.1" in choose_engine(config, facts, older.get).reason


def test_more_threads_than_cores_is_a_warning(random_model_dir: Path) -> None:
    assert severities(config_for(random_model_dir, "--threads", "64"), machine(num_cores=2))["threads"] is (
        Severity.WARNING
    )


def test_the_json_keeps_its_shape(random_model_dir: Path) -> None:
    answer = as_json(examine(config_for(random_model_dir), machine(available_bytes=2**20, limit_bytes=None)))
    assert list(answer) == ["schema", "ok", "exit_code", "findings"]
    assert (answer["schema"], answer["ok"], answer["exit_code"]) == (1, False, MachineError.exit_code)
    findings = answer["findings"]
    assert isinstance(findings, list)
    assert {tuple(finding) for finding in findings} == {("name", "severity", "text", "remedy")}
    assert {finding["severity"] for finding in findings} <= {"ok", "warn", "fatal"}
    names = [finding["name"] for finding in findings]
    assert len(names) == len(set(names))
    assert {"processor", "kernels", "ram", "engine", "gpu", "checkpoint", "files", "memory"} < set(names)
    assert {"disk", "memlock", "huge pages", "port", "software", "gpu software"} < set(names)


def test_doctor_without_a_model_checks_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    # a repository is named, so the demo model is not meant
    assert main(["doctor", "--port", "0", "--model-repo", "a/b"]) == ConfigError.exit_code
    out = capsys.readouterr().out
    assert "fatal  checkpoint: no model; give --model DIR" in out
    assert "   ok  kernels: " in out


def test_doctor_looks_at_the_model_that_serve_would_take(
    demo_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--port", "0"]) == 0
    assert f"   ok  checkpoint: {demo_model_dir}: the small demo model, 8 layers" in capsys.readouterr().out
