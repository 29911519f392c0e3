"""What `nvidia-smi` says of the GPUs, asked through a runner that a test can replace."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 2**20
TIMEOUT_S = 20.0
"""A driver that has to wake up several cards answers within seconds; a hung one never does."""

_FIELDS = (
    "index",
    "name",
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.free",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
"""The command; see `nvidia-smi --help-query-gpu`. Sizes come in MiB."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command left behind."""

    exit_code: int
    output: str
    errors: str


CommandRunner = Callable[[Sequence[str]], CommandResult]
"""Runs a command. Raises OSError if it cannot be started, TimeoutError if it does not end."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU; None for what the driver does not tell.

    compute_capability: major, minor. total_bytes, free_bytes: VRAM. link_gen, link_width: PCIe generation and
    lanes; an idle card lowers the generation in use, so it is the largest possible one (link_gen_max) that
    counts.
    """

    index: int
    name: str
    driver: str
    compute_capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    link_gen: int | None = None
    link_gen_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The GPUs, or why there are none. problem: one line, "" if all is well."""

    gpus: tuple[GpuFacts, ...] = ()
    problem: str = ""


def run_command(command: Sequence[str]) -> CommandResult:
    """Run a command to its end, at most TIMEOUT_S seconds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {TIMEOUT_S:.0f} s") from error
    return CommandResult(done.returncode, done.stdout, done.stderr)


def read_gpus(run: CommandRunner = run_command) -> GpuReport:
    """Ask nvidia-smi. Raises nothing: what went wrong is the report's `problem`."""
    try:
        result = run(QUERY)
    except FileNotFoundError:
        return GpuReport(problem="nvidia-smi is not there: no NVIDIA driver, or a container without its GPU")
    except OSError as error:  # TimeoutError among them
        return GpuReport(problem=f"nvidia-smi cannot be run: {error.strerror or error}")
    if result.exit_code != 0:
        words = (result.output.strip() or result.errors.strip() or "it says nothing").splitlines()[0]
        return GpuReport(problem=f"nvidia-smi failed with exit code {result.exit_code}: {words}")
    gpus = tuple(gpu for line in result.output.splitlines() if (gpu := _parse_line(line)) is not None)
    return GpuReport(gpus, "" if gpus else "nvidia-smi names no GPU")


def _parse_line(line: str) -> GpuFacts | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_FIELDS) or not cells[0].isdigit():
        return None
    numbers = [int(cell) if cell.isdigit() else None for cell in cells]
    major, dot, minor = cells[3].partition(".")
    has_capability = dot and major.isdigit() and minor.isdigit()
    return GpuFacts(
        index=int(cells[0]),
        name=cells[1],
        driver=cells[2],
        compute_capability=(int(major), int(minor)) if has_capability else None,
        total_bytes=_mib(numbers[4]),
        free_bytes=_mib(numbers[5]),
        link_gen=numbers[6],
        link_gen_max=numbers[7],
        link_width=numbers[8],
        link_width_max=numbers[9],
    )


def _mib(number: int | None) -> int | None:
    return None if number is None else number * MIB
