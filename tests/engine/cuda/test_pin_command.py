"""What `glm53srv pin-triton` says where it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53srv.__main__ import main
from glm53srv.errors import ConfigError, MachineError
from glm53srv.machine import GIB
from tests.pretended_machine import GPU_VERSIONS, PretendedProbe, server_machine

HERE = PretendedProbe(server_machine(), versions=GPU_VERSIONS)
BLIND = PretendedProbe(server_machine(nvidia_devices=()), versions=GPU_VERSIONS)
SMALL = PretendedProbe(server_machine(available_bytes=2 * GIB), versions=GPU_VERSIONS)
BARE = PretendedProbe(server_machine(), versions={**GPU_VERSIONS, "triton": None})


@pytest.mark.parametrize(
    ("machine", "words", "code", "reason"),
    [
        (HERE, "--layers x", ConfigError.exit_code, "--layers is 'x', must be a whole number"),
        (HERE, "--layers 3", ConfigError.exit_code, "--layers 3: from 4"),
        (HERE, "--layers 4 --model here", ConfigError.exit_code, "leave it or the model away"),
        (HERE, "--out", ConfigError.exit_code, "--out needs a file"),
        (HERE, "--outfile x", ConfigError.exit_code, "unknown"),
        (BLIND, "--layers 4", MachineError.exit_code, "pin-triton: no NVIDIA GPU was found"),
        (BARE, "--layers 4", MachineError.exit_code, "pin-triton: triton is not installed"),
        (SMALL, "--layers 4", MachineError.exit_code, "4 layers of random weights need 4.7 GiB"),
    ],
)
def test_it_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], machine: PretendedProbe, words: str, code: int, reason: str
) -> None:
    assert main(["pin-triton", "--tuning-dir", "/nowhere", *words.split()], machine) == code
    line = capsys.readouterr().err
    assert reason in line
    assert line.count("\n") == 1
    assert not Path("/nowhere").exists()
