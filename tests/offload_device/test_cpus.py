"""Which CPUs the crew gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from glm53srv.errors import ConfigError
from glm53srv.machine import MachineFacts, read_machine
from glm53srv.offload.device.cpus import choose_cpus, choose_threads, format_cpu_list, parse_cpu_list


def machine_of(tmp_path: Path, cores: list[tuple[int, int, int]], allowed: frozenset[int]) -> MachineFacts:
    """Lay out a machine of (cpu, package, core)."""
    text = "".join(
        f"processor\t: {cpu}\nphysical id\t: {package}\ncore id\t: {core}\n\n" for cpu, package, core in cores
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    return read_machine(tmp_path, allowed)


def test_auto_takes_one_cpu_per_core_and_leaves_two_cores(tmp_path: Path) -> None:
    # Four cores with two threads each, siblings 4 apart; the process may not use CPU 1.
    machine = machine_of(tmp_path, [(cpu, 0, cpu % 4) for cpu in range(8)], frozenset(range(8)) - {1})
    assert machine.core_cpus == (0, 2, 3, 5)
    assert choose_cpus("auto", machine) == (3, 5)


def test_equal_core_ids_of_two_packages_are_two_cores(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)], frozenset(range(4)))
    assert choose_cpus("auto", machine) == (2, 3)


@pytest.mark.parametrize(
    ("num_cores", "chosen"), [(1, (0,)), (2, (1,)), (3, (2,)), (24, tuple(range(2, 24)))]
)
def test_auto_on_small_machines_keeps_a_worker(num_cores: int, chosen: tuple[int, ...]) -> None:
    cpus = tuple(range(num_cores))
    machine = replace(read_machine(), cpus=cpus, core_cpus=cpus)
    assert choose_cpus("auto", machine) == chosen


def test_a_list_is_taken_as_given() -> None:
    machine = replace(read_machine(), cpus=tuple(range(8)))
    assert choose_cpus("6,2-4", machine) == (6, 2, 3, 4)
    assert choose_threads(None, (6, 2, 3, 4)) == 4
    assert choose_threads(2, (6, 2, 3, 4)) == 2


def test_a_cpu_outside_the_cpuset_is_named() -> None:
    machine = replace(read_machine(), cpus=(0, 1, 2, 5))
    with pytest.raises(ConfigError, match="names CPU 3, this process may use 0-2,5"):
        choose_cpus("2-3", machine)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,1", "2-4,3", "1 2", "70000"])
def test_lists_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="GLM53_CT_CPUS is"):
        parse_cpu_list(text)


def test_lists_are_written_as_they_are_read() -> None:
    assert format_cpu_list((7, 0, 1, 2, 5)) == "0-2,5,7"
    assert parse_cpu_list("0-2,5,7") == (0, 1, 2, 5, 7)
