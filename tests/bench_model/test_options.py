"""bench-model's flags, and what it says where it cannot run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from glm53srv.bench_model.options import parse_options
from glm53srv.engine.cuda.synthetic_plan import host_bytes, require_host_memory
from glm53srv.errors import ConfigError, MachineError
from glm53srv.machine import GIB
from glm53srv.model.published_files import published_model
from tests.pretended_machine import GPU_VERSIONS, PretendedProbe, server_machine


def test_without_flags_it_is_the_target_machine() -> None:
    options = parse_options([])
    assert (options.mode, options.layers, options.vram_gib) == ("exact", None, 24.0)
    assert options.streams == (1, 2, 4)
    assert (options.ahead, options.guess_recall) == (2, 0.67)
    assert options.reserve_gib is None
    assert options.out is None


def test_flags_are_read() -> None:
    words = "--mode fast --layers 15 --vram 0 --reserve 0.75 --streams 2 --prefill --soak 1.5 --out here.json"
    options = parse_options(words.split())
    assert (options.mode, options.layers, options.vram_gib, options.soak_s) == ("fast", 15, 0.0, 1.5)
    assert (options.streams, options.prefill_tokens) == ((2,), ())
    assert options.reserve_gib == 0.75
    assert options.out == Path("here.json")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--mode quick", "invalid choice: 'quick'"),
        ("--layers many", "invalid whole number value: 'many'"),
        ("--layers 0", "0 is not in 1.."),
        ("--streams 5", "5 is not in 1..4"),
        ("--vram -1", "-1 is not a number from 0"),
        ("--soak nan", "nan is not a number from 0"),
        ("--ahead 5", "5 is not in 0..4"),
        ("--guess-recall 1.5", "1.5 is not a number from 0 to 1"),
        ("--model here", "unrecognized arguments: --model here"),
        ("--lay 5", "unrecognized arguments: --lay 5"),
    ],
)
def test_a_wrong_flag_is_one_line(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(words.split())
    assert reason in str(caught.value)
    assert main(["bench-model", *words.split()]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert told == f"glm53srv: {caught.value}\n"


def test_its_help_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-model", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--beside-layers" in text
    assert "--served-name" not in text


def refusal(capsys: pytest.CaptureFixture[str], machine: PretendedProbe, *words: str) -> str:
    assert main(["bench-model", *words], machine) == MachineError.exit_code
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_a_machine_without_gpu_or_packages_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    blind = PretendedProbe(server_machine(nvidia_devices=()), versions=GPU_VERSIONS)
    assert "bench-model: no NVIDIA GPU was found" in refusal(capsys, blind)
    old = {**GPU_VERSIONS, "exllamav3": "1.6.5"}
    assert "exllamav3 is 1.6.5, not 1.5.1" in refusal(capsys, PretendedProbe(server_machine(), versions=old))


def test_too_little_memory_is_refused_with_the_layers_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    machine = PretendedProbe(server_machine(available_bytes=60 * GIB), versions=GPU_VERSIONS)
    line = refusal(capsys, machine)
    assert (
        "45 layers of random weights need 108.9 GiB of host memory, 60.0 are usable: --layers 25 fits" in line
    )


@pytest.mark.parametrize("num_layers", range(4, 46))
def test_the_layers_that_fit_are_the_most_that_do(num_layers: int) -> None:
    available = host_bytes(published_model(num_layers)) + GIB
    machine = server_machine(available_bytes=available)
    require_host_memory(published_model(num_layers), machine)
    if num_layers < 45:
        with pytest.raises(MachineError, match=f"--layers {num_layers} fits"):
            require_host_memory(published_model(45), machine)
    short = dataclasses.replace(machine, available_bytes=available - 1)
    with pytest.raises(MachineError, match=f"{num_layers - 1} fits" if num_layers > 4 else "more"):
        require_host_memory(published_model(num_layers), short)
