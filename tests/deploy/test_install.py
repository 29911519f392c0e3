"""What install.sh checks before it changes anything, on machines laid out of stub programs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.build_exllamav3 import BuildError, num_jobs, sources_in

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "scripts" / "install.sh"
SYSTEM_PROGRAMS = ("awk", "bash", "cat", "df", "dirname", "env", "head", "sed", "sh")

GOOD = {
    "gcc": "exit 0",
    "g++": "exit 0",
    "nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'",
    "nvidia-smi": "case $1 in *driver*) echo 580.95.05;; *) echo 8.6;; esac",
    "python3": """case $2 in
        *path*) echo "$HOME/include";;
        *platform*) echo 3.12.3;;
    esac""",
}


def check(
    tmp_path: Path,
    *arguments: str,
    without: str = "",
    variables: Mapping[str, str] | None = None,
    programs: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run --check where PATH holds only stubs and a few programs of the system.

    programs: shell text of stubs that differ from GOOD.
    """
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    stubs = {**GOOD, **(programs or {})}
    for name, body in stubs.items():
        if name != without:
            (bin_dir / name).write_text(f"#!/bin/sh\n{body}\n")
            (bin_dir / name).chmod(0o755)
    for name in SYSTEM_PROGRAMS:
        if name in stubs:
            continue
        path = next(Path(folder) / name for folder in ("/usr/bin", "/bin") if (Path(folder) / name).exists())
        (bin_dir / name).symlink_to(path)
    command = ["/bin/bash", str(INSTALL), "--check", "--root", str(tmp_path / "new" / "root"), *arguments]
    environment = {"PATH": str(bin_dir), "HOME": str(tmp_path), **(variables or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_machine_with_everything_passes_and_nothing_is_written(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"all that --cuda needs is here; installing into {tmp_path}/new/root\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("without", "needle"),
    [
        ("gcc", "missing: a C compiler for the CPU kernels; apt-get install gcc"),
        ("g++", "missing: a C++ compiler for exllamav3; apt-get install g++"),
        ("nvcc", "missing: nvcc of the CUDA 13 toolkit; install cuda-toolkit-13-0"),
        ("nvidia-smi", "missing: nvidia-smi, so no NVIDIA driver; install driver 580 or newer, or use --cpu"),
        ("python3", "missing: python3; install it (Debian, Ubuntu: apt-get install python3 python3-venv)"),
    ],
)
def test_a_missing_program_is_one_line_with_its_remedy(tmp_path: Path, without: str, needle: str) -> None:
    result = check(tmp_path, without=without)
    assert result.returncode == 1
    assert needle in result.stderr
    assert result.stderr.endswith("of the things above are to be mended; nothing was changed\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("programs", "needle"),
    [
        ({"nvcc": "echo 'release 12.8, V12.8.1'"}, "missing: nvcc 13, nvcc is 12; install cuda-toolkit-13-0"),
        (
            {"nvidia-smi": "case $1 in *driver*) echo 570.1;; *) echo 8.6;; esac"},
            "this one is 570.1; update it",
        ),
        (
            {"nvidia-smi": "echo 'NVIDIA-SMI has failed'; exit 9"},
            "nvidia-smi fails: reboot after a driver update",
        ),
        (
            {"nvidia-smi": "case $1 in *driver*) echo 580.1;; *) echo 7.5;; esac"},
            "one here has 7.5; use --cpu",
        ),
        (
            {"python3": "case $2 in *platform*) echo 3.10.12;; *) exit 1;; esac"},
            "Python 3.11 to 3.13, python3 is 3.10.12",
        ),
        ({"python3": "echo /nowhere"}, "missing: Python.h (/nowhere/Python.h)"),
        ({"df": "printf 'head\\n/dev/x 9 9 3000000 1%% /\\n'"}, "missing: 12 GB of disk under"),
    ],
)
def test_a_wrong_version_is_one_line_with_its_remedy(
    tmp_path: Path, programs: dict[str, str], needle: str
) -> None:
    result = check(tmp_path, programs=programs)
    assert result.returncode == 1
    assert needle in result.stderr


def test_without_a_gpu_only_python_and_a_c_compiler_are_asked_for(tmp_path: Path) -> None:
    broken = {"nvcc": "exit 1", "nvidia-smi": "exit 1", "df": "printf 'h\nx 9 9 2000000 1%% /\n'"}
    result = check(tmp_path, "--cpu", programs=broken)
    assert result.returncode == 0, result.stderr


def test_a_named_architecture_needs_no_gpu_here(tmp_path: Path) -> None:
    result = check(tmp_path, without="nvidia-smi", variables={"TORCH_CUDA_ARCH_LIST": "8.6"})
    assert result.returncode == 0, result.stderr


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    result = check(tmp_path, "--gpu")
    assert result.returncode == 2
    assert "unknown option --gpu; there are --cpu, --check" in result.stderr


def test_help_is_the_head_of_the_script() -> None:
    output = subprocess.run([INSTALL, "--help"], check=True, capture_output=True, text=True).stdout
    assert output.startswith("Install glm53srv for this machine, without a container")
    assert "set -euo" not in output


def test_sources_of_the_extension_are_found_in_one_order(tmp_path: Path) -> None:
    for name in ("b.cu", "a.cpp", "quant/c.cu", "quant/d.cuh", "readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [Path(path).name for path in sources_in(tmp_path)] == ["a.cpp", "b.cu", "c.cu"]
    with pytest.raises(BuildError, match="no sources below"):
        sources_in(tmp_path / "quant" / "none")


@pytest.mark.parametrize(("cores", "memory_gib", "jobs"), [(16, 128, 16), (16, 8, 4), (4, 1, 1), (1, 64, 1)])
def test_compilers_have_a_core_and_memory_each(cores: int, memory_gib: int, jobs: int) -> None:
    assert num_jobs(cores, memory_gib * 2**30) == jobs
