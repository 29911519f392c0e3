"""Wrong set-ups that need another machine: the checks see a pretended one, by the probe that main() takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from glm53srv.config import Config, load_config
from glm53srv.doctor.examine import examine, require_machine, require_servable
from glm53srv.doctor.findings import Finding, Severity, exit_code
from glm53srv.doctor.model import check_disk, open_model
from glm53srv.engine.factory import EngineChoice
from glm53srv.errors import MachineError
from glm53srv.gpu_facts import GpuReport
from glm53srv.machine import GIB
from tests.pretended_machine import (
    GPU_VERSIONS,
    RTX_3090,
    SCALAR,
    PretendedProbe,
    server_machine,
    with_gpu,
)

MIB = 2**20


def use_cuda(config: object, machine: object) -> EngineChoice:
    """Choose as a version does that can use the GPU."""
    return EngineChoice("cuda", "for the test")


def configure(model_dir: Path, *arguments: str) -> Config:
    words = ["--model", str(model_dir), "--port", "0", *arguments]
    return load_config(words, {}, num_cores=24)


@dataclass(frozen=True, slots=True)
class Case:
    """A machine with something wrong; problem and remedy are parts of the finding called `finding`."""

    name: str
    finding: str
    severity: Severity
    problem: str
    remedy: str
    probe: Callable[[], PretendedProbe]
    arguments: tuple[str, ...] = ()


FATAL, WARN = Severity.FATAL, Severity.WARNING

WITH_GPU = (
    Case(
        "no memlock",
        "memlock",
        FATAL,
        "4 MiB may be locked, the experts need 8 MiB",
        "ulimit -l unlimited",
        lambda: with_gpu(RTX_3090, memlock_bytes=4 * MIB),
    ),
    Case(
        "no AVX2 in fast mode",
        "kernels",
        FATAL,
        "the CPU has no avx2, f16c",
        "use --mode exact",
        lambda: dataclasses.replace(with_gpu(RTX_3090, cpu_flags=frozenset({"fma"})), native=SCALAR),
    ),
    Case(
        "4 cores",
        "expert workers",
        WARN,
        "2 expert workers would take about 1.14 ms for an expert that the GPU reads in 0.40 ms",
        "use --mode exact",
        lambda: with_gpu(
            RTX_3090, num_cores=4, num_physical_cores=4, cpus=(0, 1, 2, 3), core_cpus=(0, 1, 2, 3)
        ),
        ("--threads", "4"),
    ),
    Case(
        "no GPU",
        "gpu",
        FATAL,
        "none: nvidia-smi is not there",
        "install the NVIDIA driver",
        lambda: PretendedProbe(server_machine(nvidia_devices=()), versions=GPU_VERSIONS),
    ),
    Case(
        "container without its GPU",
        "gpu",
        FATAL,
        "NVIDIA GeForce RTX 3090 is in the machine, but nvidia-smi is not there",
        "give the container its GPU",
        lambda: PretendedProbe(server_machine(), versions=GPU_VERSIONS),
    ),
    Case(
        "broken driver",
        "gpu",
        FATAL,
        "nvidia-smi failed with exit code 9",
        "install the NVIDIA driver",
        lambda: PretendedProbe(
            server_machine(), GpuReport(problem="nvidia-smi failed with exit code 9"), versions=GPU_VERSIONS
        ),
    ),
    Case(
        "old driver",
        "driver",
        FATAL,
        "driver 535.129.03 is older than 580",
        "install a driver 580 or newer",
        lambda: with_gpu(dataclasses.replace(RTX_3090, driver="535.129.03")),
    ),
    Case(
        "old GPU",
        "compute capability",
        FATAL,
        "has compute capability 7.5, the kernels need 8.0",
        "use an Ampere card or newer",
        lambda: with_gpu(dataclasses.replace(RTX_3090, compute_capability=(7, 5))),
    ),
    Case(
        "untried GPU",
        "compute capability",
        WARN,
        "10.0 is none of those the kernels are compiled for",
        "nobody has tried it",
        lambda: with_gpu(dataclasses.replace(RTX_3090, compute_capability=(10, 0))),
    ),
    Case(
        "PCIe x4",
        "link",
        WARN,
        "PCIe 4.0 x4, at most 7.9 GB/s",
        "put the card into a slot with 16 lanes",
        lambda: with_gpu(dataclasses.replace(RTX_3090, link_width=4)),
    ),
    Case(
        "PCIe 3.0, asleep",
        "link",
        WARN,
        "PCIe 3.0 x16 (generation 1 now), at most 15.8 GB/s",
        "a 4.0 x16 slot is faster",
        lambda: with_gpu(dataclasses.replace(RTX_3090, link_gen=1, link_gen_max=3)),
    ),
    Case(
        "two GPUs",
        "gpu count",
        WARN,
        "2 GPUs, only the first is used",
        "CUDA_VISIBLE_DEVICES",
        lambda: with_gpu(RTX_3090, dataclasses.replace(RTX_3090, index=1)),
    ),
    Case(
        "WSL",
        "wsl",
        WARN,
        "lets a process pin only a part of the memory",
        "run on Linux itself",
        lambda: with_gpu(RTX_3090, kernel="6.6.36.3-microsoft-standard-WSL2"),
    ),
    Case(
        "old exllamav3",
        "gpu software",
        FATAL,
        "exllamav3 1.4.6 is installed, 1.5.1 is the version",
        "pip install exllamav3==1.5.1",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "exllamav3": "1.4.6"}),
    ),
    Case(
        "no torch",
        "gpu software",
        FATAL,
        "torch not installed, there is triton 3.6.0, exllamav3 1.5.1: a GPU needs them",
        "pip install 'glm53srv[cuda]'",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "torch": None}),
    ),
    Case(
        "16 GB card for a context too long",
        "gpu memory",
        FATAL,
        "does not fit: VRAM: ",
        "use -cs ",
        lambda: with_gpu(dataclasses.replace(RTX_3090, free_bytes=4 * GIB)),
        ("-cs", "30000000"),
    ),
    Case(
        "a control group smaller than the process",
        "gpu memory",
        FATAL,
        "RAM: ",
        "add RAM",
        lambda: with_gpu(RTX_3090, limit_bytes=3 * GIB),
    ),
)

WITHOUT_GPU = (
    Case(
        "8 GB control group and a long context",
        "memory",
        FATAL,
        "(control group limit 8.0)",
        "use --cache-tokens ",
        lambda: PretendedProbe(server_machine(limit_bytes=8 * GIB)),
        ("-cs", "10000000"),
    ),
    Case(
        "no AVX2",
        "kernels",
        WARN,
        "the CPU has no avx2, fma, f16c: the scalar kernels are used",
        "use a CPU with AVX2",
        lambda: PretendedProbe(server_machine(cpu_flags=frozenset()), native=SCALAR),
    ),
    Case(
        "a build without AVX2",
        "kernels",
        WARN,
        "this build has no AVX2 kernels",
        "rebuild with python -m cffi_build",
        lambda: PretendedProbe(server_machine(), native=SCALAR),
    ),
    Case(
        "kernels asked for that are not there",
        "kernels",
        FATAL,
        "--isa avx512: this CPU or this build has only scalar, avx2",
        "use --isa auto",
        lambda: PretendedProbe(server_machine()),
        ("--isa", "avx512"),
    ),
    Case(
        "kernels not built",
        "kernels",
        FATAL,
        "the native kernels are not built",
        "python -m cffi_build",
        lambda: PretendedProbe(server_machine(), native=None),
    ),
    Case(
        "4 cores for 24 threads",
        "threads",
        WARN,
        "24 threads on 4 logical CPUs wait for each other",
        "use --threads 4",
        lambda: PretendedProbe(server_machine(num_cores=4, num_physical_cores=4)),
        ("--threads", "24"),
    ),
    Case(
        "a quota of two cores",
        "processor time",
        WARN,
        "the control group grants 2 cores of time and 22 threads would share them",
        "use --threads 2",
        lambda: PretendedProbe(server_machine(cpu_quota=2.0)),
    ),
    Case(
        "a GPU that this version does not use",
        "engine",
        WARN,
        "NVIDIA GeForce RTX 3090 is not used",
        "the CPU engine serves",
        lambda: with_gpu(RTX_3090),
    ),
    Case(
        "old driver of a GPU that is not needed",
        "driver",
        WARN,
        "driver 535.129.03 is older than 580",
        "install a driver 580 or newer",
        lambda: with_gpu(dataclasses.replace(RTX_3090, driver="535.129.03")),
    ),
    Case(
        "old exllamav3 that is not needed",
        "gpu software",
        WARN,
        "exllamav3 1.4.6 is installed",
        "pip install exllamav3==1.5.1",
        lambda: dataclasses.replace(with_gpu(RTX_3090), versions={**GPU_VERSIONS, "exllamav3": "1.4.6"}),
    ),
    Case(
        "heat in a directory that is not there",
        "heat",
        WARN,
        "no/such/folder/heat.npz cannot be written",
        "name a file in a directory of this user",
        lambda: PretendedProbe(server_machine()),
        ("--ec-heat", "no/such/folder/heat.npz"),
    ),
    Case(
        "a package is missing",
        "software",
        FATAL,
        "packages are not installed: llguidance",
        "pip install glm53srv again",
        lambda: PretendedProbe(server_machine(), versions={"llguidance": None}),
    ),
    Case(
        "a GPU asked for that this version cannot use",
        "engine",
        FATAL,
        "this version has no CUDA engine",
        "use --engine cpu",
        lambda: with_gpu(RTX_3090),
        ("--engine", "cuda"),
    ),
)


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
