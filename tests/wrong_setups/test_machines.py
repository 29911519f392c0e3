"""Wrong set-ups that need another machine: the checks see a pretended one, by the probe that main() takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from glm53srv.config import Config, load_config
from glm53srv.doctor.examine import examine, require_machine, require_servable
from glm53srv.doctor.findings import Finding, Severity, exit_code
from glm53srv.doctor.model import check_disk, open_model
from glm53srv.engine.factory import EngineChoice
from glm53srv.errors import MachineError
from glm53srv.machine import GIB
from tests.pretended_machine import RTX_3090, PretendedProbe, server_machine, with_gpu
from tests.wrong_setups.machines import FATAL, WARN, WITH_GPU, WITHOUT_GPU, Case


def use_cuda(config: object, machine: object, version: object) -> EngineChoice:
    """Choose the GPU whatever is there, so that the other checks have their say."""
    return EngineChoice("cuda", "for the test")


def configure(model_dir: Path, *arguments: str) -> Config:
    words = ["--model", str(model_dir), "--port", "0", *arguments]
    return load_config(words, {}, num_cores=24)


def check(case: Case, findings: list[Finding]) -> Finding:
    found = [finding for finding in findings if finding.name == case.finding]
    assert len(found) == 1, findings
    assert found[0].severity is case.severity
    assert case.problem in found[0].text
    assert case.remedy in found[0].remedy
    return found[0]


@pytest.mark.parametrize("case", WITH_GPU, ids=lambda case: case.name)
def test_a_machine_for_the_gpu(case: Case, random_model_dir: Path) -> None:
    config = configure(random_model_dir, *case.arguments)
    finding = check(case, examine(config, case.probe(), use_cuda))
    if case.severity is WARN:
        require_servable(config, case.probe(), use_cuda)
        return
    with pytest.raises(MachineError) as caught:
        require_servable(config, case.probe(), use_cuda)
    assert str(caught.value) == f"{finding.text}; {finding.remedy}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", WITHOUT_GPU, ids=lambda case: case.name)
def test_a_machine_for_the_cpu_engine(
    case: Case, random_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(random_model_dir), "--port", "0", *case.arguments]
    code = main(["doctor", *words], case.probe())
    assert code == (MachineError.exit_code if case.severity is FATAL else 0)
    assert capsys.readouterr().err == ""
    check(case, examine(configure(random_model_dir, *case.arguments), case.probe()))
    if case.severity is FATAL:
        assert main(["serve", *words], case.probe()) == MachineError.exit_code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("glm53srv: ")
        assert case.problem in lines[0]
        assert case.remedy in lines[0]


def test_nothing_is_wrong_with_the_machine_the_cases_start_from(random_model_dir: Path) -> None:
    findings = examine(configure(random_model_dir), with_gpu(RTX_3090), use_cuda)
    assert [finding for finding in findings if finding.severity is not Severity.OK] == []
    assert exit_code(findings) == 0


def test_every_bad_finding_says_what_to_do(random_model_dir: Path) -> None:
    for cases, chooser in ((WITH_GPU, use_cuda), (WITHOUT_GPU, None)):
        for case in cases:
            config = configure(random_model_dir, *case.arguments)
            findings = examine(config, case.probe(), *(() if chooser is None else (chooser,)))
            assert all(finding.remedy for finding in findings if finding.severity is not Severity.OK), (
                case.name
            )
            assert all("\n" not in f"{finding.text}{finding.remedy}" for finding in findings)


def test_serve_asks_no_slow_question_on_a_machine_without_a_gpu(random_model_dir: Path) -> None:
    probe = PretendedProbe(server_machine(nvidia_devices=()))
    require_servable(configure(random_model_dir), probe)
    assert probe.questions == []
    examine(configure(random_model_dir), probe)
    assert probe.questions == ["gpus", "read_rate"]


def test_the_cache_that_the_error_names_fits(random_model_dir: Path) -> None:
    probe = PretendedProbe(server_machine(limit_bytes=GIB))
    with pytest.raises(MachineError, match=r"use --cache-tokens \d+ \(-cs\)") as caught:
        require_servable(configure(random_model_dir, "-cs", "10000000"), probe)
    words = str(caught.value).split()
    named = int(words[words.index("--cache-tokens") + 1])
    assert named % 256 == 0
    require_servable(configure(random_model_dir, "-cs", str(named)), probe)


def test_a_hopeless_machine_is_told_before_a_model_is_fetched(tmp_path: Path) -> None:
    require_machine(configure(tmp_path / "empty"), PretendedProbe(server_machine()))
    with pytest.raises(MachineError, match="kernels are not built"):
        require_machine(configure(tmp_path / "empty"), PretendedProbe(server_machine(), native=None))


def test_a_model_that_serve_will_fetch_is_a_warning(tmp_path: Path) -> None:
    words = ["--model", str(tmp_path / "empty"), "--port", "0", "--model-repo", "a/b"]
    probe = PretendedProbe(server_machine())
    findings = examine(load_config(words, {}, num_cores=24), probe)
    (finding,) = [finding for finding in findings if finding.name == "checkpoint"]
    assert finding.severity is WARN
    assert finding.remedy == "serve fetches a/b first, `glm53srv download` does it now"
    refused = examine(load_config([*words, "--model-download", "0"], {}, num_cores=24), probe)
    assert exit_code(refused) == 3


@pytest.mark.parametrize(
    ("rate", "severity", "text"),
    [
        (2e9, Severity.OK, "50.0 s"),
        (1e8, Severity.WARNING, "1000.0 s"),
        (None, Severity.OK, "cannot be measured"),
    ],
)
def test_a_slow_disk_is_a_warning_for_a_large_model(
    random_model_dir: Path, rate: float | None, severity: Severity, text: str
) -> None:
    opened = dataclasses.replace(open_model(configure(random_model_dir).engine), weight_bytes=10**11)
    probe = dataclasses.replace(PretendedProbe(server_machine()), rate=rate)
    finding = check_disk(opened, probe)
    assert finding.severity is severity
    assert text in finding.text
    assert bool(finding.remedy) == (severity is Severity.WARNING)


def test_huge_pages_matter_for_a_large_model_only() -> None:
    from glm53srv.doctor.processor import check_huge_pages

    machine = server_machine(transparent_huge_pages="never")
    assert check_huge_pages(machine, is_large=False).severity is Severity.OK
    finding = check_huge_pages(machine, is_large=True)
    assert finding.severity is Severity.WARNING
    assert "transparent_hugepage" in finding.remedy
