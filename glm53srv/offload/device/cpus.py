"""Which logical CPUs the crew may use: GLM53_CT_CPUS and GLM53_CT_THREADS."""

from __future__ import annotations

from collections.abc import Sequence

from glm53srv.errors import ConfigError
from glm53srv.machine import MachineFacts

CORES_LEFT_FREE = 2
"""Physical cores, the first ones, for the event loop, the engine thread and interrupts."""

AUTO = "auto"


def choose_cpus(text: str, machine: MachineFacts) -> tuple[int, ...]:
    """Give the CPUs that GLM53_CT_CPUS names; "auto" takes one per physical core and leaves the first free.

    Two cores stay free, one of two cores, none of one. Raises ConfigError for a list that cannot be read or
    names a CPU that this process may not use.
    """
    if text == AUTO:
        cores = machine.core_cpus or (0,)
        return cores[min(CORES_LEFT_FREE, len(cores) - 1) :]
    cpus = parse_cpu_list(text)
    foreign = [cpu for cpu in cpus if machine.cpus and cpu not in machine.cpus]
    if foreign:
        raise ConfigError(
            f"GLM53_CT_CPUS names CPU {foreign[0]}, this process may use {format_cpu_list(machine.cpus)}"
        )
    return cpus


def choose_threads(num_threads: int | None, cpus: Sequence[int]) -> int:
    """Give the crew's number of threads: GLM53_CT_THREADS, by default one per CPU."""
    return len(cpus) if num_threads is None else num_threads


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read a list such as "2-5,8". Raises ConfigError."""
    cpus: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"GLM53_CT_CPUS is {text!r}, must be auto or a list such as 2-23 or 2,4,6-8")
        begin, end = int(first), int(last) if dash else int(first)
        if end < begin or end > 65535:
            raise ConfigError(f"GLM53_CT_CPUS is {text!r}: {piece.strip()} is no range of CPUs")
        cpus += range(begin, end + 1)
    if len(set(cpus)) != len(cpus):
        raise ConfigError(f"GLM53_CT_CPUS is {text!r}: it names a CPU twice")
    return tuple(cpus)


def format_cpu_list(cpus: Sequence[int]) -> str:
    """Write CPUs the way parse_cpu_list reads them."""
    runs: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1] = (runs[-1][0], cpu)
        else:
            runs.append((cpu, cpu))
    return ",".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in runs)
