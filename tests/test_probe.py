"""What is asked of the driver and the disk, and what is made of their answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53srv.gpu_facts import QUERY, CommandResult, CommandRunner, read_gpus, run_command
from glm53srv.packages import package_version
from glm53srv.probe import BLOCK_BYTES, LocalProbe, measure_read_rate

TWO_GPUS = (
    "0, NVIDIA GeForce RTX 3090, 610.57.04, 8.6, 24576, 24266, 1, 4, 16, 16\n"
    "1, NVIDIA A100-SXM4-40GB, 610.57.04, 8.0, [N/A], [N/A], [Not Supported], [N/A], [N/A], [N/A]\n"
)


def answering(exit_code: int, output: str = "", errors: str = "") -> CommandRunner:
    def run(command: Sequence[str]) -> CommandResult:
        assert command == QUERY
        return CommandResult(exit_code, output, errors)

    return run


def raising(error: OSError) -> CommandRunner:
    def run(command: Sequence[str]) -> CommandResult:
        raise error

    return run


def test_every_field_is_read_and_what_the_driver_does_not_tell_is_none() -> None:
    report = read_gpus(answering(0, TWO_GPUS))
    assert report.problem == ""
    first, second = report.gpus
    assert (first.index, first.name, first.driver) == (0, "NVIDIA GeForce RTX 3090", "610.57.04")
    assert first.compute_capability == (8, 6)
    assert (first.total_bytes, first.free_bytes) == (24576 * 2**20, 24266 * 2**20)
    assert (first.link_gen, first.link_gen_max, first.link_width, first.link_width_max) == (1, 4, 16, 16)
    assert second.compute_capability == (8, 0)
    assert (second.total_bytes, second.free_bytes, second.link_gen_max, second.link_width) == (None,) * 4


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (raising(FileNotFoundError(2, "No such file or directory")), "nvidia-smi is not there"),
        (raising(PermissionError(13, "Permission denied")), "cannot be run: Permission denied"),
        (raising(TimeoutError("no answer within 20 s")), "cannot be run: no answer within 20 s"),
        (
            answering(9, "NVIDIA-SMI has failed because it couldn't communicate\nmore"),
            "exit code 9: NVIDIA-SMI",
        ),
        (answering(255, "", "Unable to determine the device handle"), "exit code 255: Unable"),
        (answering(1), "exit code 1: it says nothing"),
        (answering(0, "No devices were found\n"), "nvidia-smi names no GPU"),
        (answering(0, ""), "nvidia-smi names no GPU"),
    ],
)
def test_no_gpu_is_a_reason_and_no_exception(run: CommandRunner, problem: str) -> None:
    report = read_gpus(run)
    assert report.gpus == ()
    assert problem in report.problem
    assert "\n" not in report.problem


def test_a_command_is_run_to_its_end() -> None:
    result = run_command(("sh", "-c", "echo out; echo err >&2; exit 3"))
    assert (result.exit_code, result.output, result.errors) == (3, "out\n", "err\n")
    with pytest.raises(FileNotFoundError):
        run_command(("no-such-command-anywhere",))


def test_the_read_rate_is_bytes_over_time(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 * BLOCK_BYTES))
    ticks = itertools.count(0.0, 0.25)
    assert measure_read_rate(file, lambda: next(ticks)) == 4 * BLOCK_BYTES / 1.25


def test_reading_ends_after_a_second(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 * BLOCK_BYTES))
    ticks = itertools.count(0.0, 2.0)
    assert measure_read_rate(file, lambda: next(ticks)) == BLOCK_BYTES / 4.0


def test_a_small_or_missing_file_has_no_rate(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(BLOCK_BYTES - 1))
    assert measure_read_rate(tmp_path / "small") is None
    assert measure_read_rate(tmp_path / "missing") is None


def test_versions_come_from_metadata() -> None:
    assert package_version("pytest") == pytest.__version__
    assert package_version("no-such-package-anywhere") is None


def test_the_local_probe_answers() -> None:
    probe = LocalProbe()
    assert probe.facts().num_cores >= 1
    assert probe.features().isas
    assert probe.version("numpy")
    assert probe.read_rate(Path("/nonexistent")) is None
