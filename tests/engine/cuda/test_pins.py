"""Pins of Triton's kernels: found, chosen, applied, written and read; a broken file never stops a start."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glm53srv.engine.cuda.pins import (
    Pin,
    PinError,
    find_autotuners,
    find_pins,
    forget_choices,
    pin_autotuners,
    pin_file_name,
    read_choices,
    read_pins,
    write_pins,
)


@dataclass
class Config:
    """What triton.Config has."""

    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


def kernel() -> None:
    """Stand for a kernel."""


def other_kernel() -> None:
    """Stand for another."""


@dataclass
class Jit:
    """triton.jit's object: the function in fn, and run."""

    fn: Any = kernel

    def run(self) -> None:
        """A kernel is started by it."""


@dataclass
class Tuner:
    """triton.autotune's object."""

    fn: Any = field(default_factory=Jit)
    configs: list[Config] = field(default_factory=list)
    cache: dict[object, Config] = field(default_factory=dict)
    cache_results: bool = True

    @property
    def base_fn(self) -> Any:
        """The Python function."""
        return self.fn.fn

    def run(self) -> None:
        """A kernel is started by it."""


@dataclass
class Heuristics:
    """triton.heuristics' object."""

    fn: Any

    def run(self) -> None:
        """A kernel is started by it."""


CONFIGS = [Config({"BK": 32}, 2, 2), Config({"BK": 64}, 4, 2), Config({"BK": 64}, 4, 3)]
PIN = Pin((("BK", 64),), 4, 2)


def tuner(function: Any = kernel) -> Tuner:
    return Tuner(Jit(function), list(CONFIGS))


def test_a_pinned_kernel_takes_the_configuration_of_its_list() -> None:
    found = tuner()
    report = pin_autotuners({"kernel": found}, {"kernel": PIN}, Config)
    assert found.configs == [CONFIGS[1]]
    assert found.configs[0] is CONFIGS[1]
    assert (report.pinned, report.built, report.first) == (("kernel",), (), ())


def test_a_pin_that_is_not_in_the_list_is_built() -> None:
    found = tuner()
    report = pin_autotuners({"kernel": found}, {"kernel": Pin((("BK", 128),), 8, 1)}, Config)
    assert found.configs == [Config({"BK": 128}, 8, 1)]
    assert report.built == ("kernel",)


def test_without_a_pin_it_is_the_first_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tuners = {"kernel": tuner(), "other_kernel": tuner(other_kernel)}
    with caplog.at_level(logging.INFO):
        report = pin_autotuners(tuners, {"kernel": PIN}, Config)
    assert tuners["other_kernel"].configs == [CONFIGS[0]]
    assert report.first == ("other_kernel",)
    assert [record.message for record in caplog.records] == [
        "triton autotuners=2 pinned=1 first=1",
        "triton kernels without a pin: other_kernel",
    ]


def test_a_pin_of_a_kernel_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pin_autotuners({"kernel": tuner()}, {"kernel": PIN, "gone": PIN}, Config)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "the pin file names kernels that are not there: gone"
    ]


def test_the_most_frequent_choice_is_kept_and_of_equals_the_first() -> None:
    often, even, silent = tuner(), tuner(), tuner()
    often.cache = dict(enumerate([CONFIGS[0], CONFIGS[2], Config({"BK": 64}, 4, 3)]))
    even.cache = dict(enumerate([CONFIGS[1], CONFIGS[0]]))
    assert read_choices({"often": often, "even": even, "silent": silent}) == {
        "often": Pin.of(CONFIGS[2]),
        "even": Pin.of(CONFIGS[1]),
    }


def test_forgetting_makes_an_autotuner_time_anew() -> None:
    found = tuner()
    found.cache[64] = CONFIGS[0]
    forget_choices({"kernel": found})
    assert found.cache == {}
    assert not found.cache_results  # nor does it read what an earlier process found
    assert found.configs == CONFIGS


@pytest.fixture
def package() -> Iterator[ModuleType]:
    """A package of two modules, loaded as Python would have it."""
    names = ("pinned_package", "pinned_package.one", "pinned_package.two", "pinned_packages")
    modules = {name: ModuleType(name) for name in names}
    sys.modules.update(modules)
    yield modules["pinned_package"]
    for name in names:
        del sys.modules[name]


def test_autotuners_are_found_under_decorators_once_each(package: ModuleType) -> None:
    bare, covered, foreign = tuner(), tuner(other_kernel), tuner()
    vars(sys.modules["pinned_package.one"]).update(kernel=bare, jitted=Jit(), number=3, function=kernel)
    vars(sys.modules["pinned_package.two"]).update(again=bare, covered=Heuristics(Heuristics(covered)))
    vars(sys.modules["pinned_packages"]).update(foreign=foreign)
    assert find_autotuners(package, Tuner) == {"kernel": bare, "other_kernel": covered}


def test_two_kernels_of_one_name_are_both_found(package: ModuleType) -> None:
    first, second = tuner(), tuner()
    sys.modules["pinned_package.one"].__dict__["kernel"] = first
    sys.modules["pinned_package.two"].__dict__["kernel"] = second
    found = find_autotuners(package, Tuner)
    assert list(found) == ["kernel", "test_pins.kernel"]
    assert [found["kernel"], found["test_pins.kernel"]] == [first, second]


@pytest.mark.parametrize(
    ("capability", "version", "name"),
    [
        ((8, 6), "3.6.0", "sm86-triton3.6.json"),
        ((9, 0), "3.10.1", "sm90-triton3.10.json"),
        ((12, 0), "3.7.0+git1a2b", "sm120-triton3.7.json"),
    ],
)
def test_a_file_is_named_by_architecture_and_triton(
    capability: tuple[int, int], version: str, name: str
) -> None:
    assert pin_file_name(capability, version) == name


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    pins = {"kernel": PIN, "solve": Pin((("DOT_PRECISION", "ieee"), ("IS_WIDE", True)), 1, 3)}
    write_pins(tmp_path / "new folder" / "pins.json", pins, "a card")
    assert read_pins(tmp_path / "new folder" / "pins.json") == pins
    assert json.loads((tmp_path / "new folder" / "pins.json").read_bytes())["about"] == "a card"


def test_the_first_folder_with_the_file_wins(tmp_path: Path) -> None:
    mine, shipped = tmp_path / "mine", tmp_path / "shipped"
    write_pins(shipped / "sm86.json", {"kernel": Pin((), 1, 1)}, "shipped")
    assert find_pins("sm86.json", [mine, shipped]) == {"kernel": Pin((), 1, 1)}
    write_pins(mine / "sm86.json", {"kernel": PIN}, "mine")
    assert find_pins("sm86.json", [mine, shipped]) == {"kernel": PIN}


def test_no_file_is_told_with_the_way_to_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert find_pins("sm99.json", [tmp_path]) == {}
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "sm99.json is not in" in record.message
    assert "glm53srv pin-triton" in record.message


GOOD = {"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 2}
BROKEN = [
    ("{", "is not JSON"),
    ("[]", 'has no object "kernels"'),
    ('{"kernels": []}', 'has no object "kernels"'),
    (json.dumps({"kernels": {"k": 3}}), "k: wants exactly"),
    (json.dumps({"kernels": {"k": {"kwargs": {}, "num_warps": 4}}}), "k: wants exactly"),
    (json.dumps({"kernels": {"k": GOOD | {"more": 1}}}), "k: wants exactly"),
    (json.dumps({"kernels": {"k": GOOD | {"kwargs": {"BK": [1]}}}}), "k: kwargs must be"),
    (json.dumps({"kernels": {"k": GOOD | {"kwargs": {"BK": 1.5}}}}), "k: kwargs must be"),
    (json.dumps({"kernels": {"k": GOOD | {"num_warps": 3}}}), "k: num_warps must be"),
    (json.dumps({"kernels": {"k": GOOD | {"num_warps": 0}}}), "k: num_warps must be"),
    (json.dumps({"kernels": {"k": GOOD | {"num_warps": True}}}), "k: num_warps must be"),
    (json.dumps({"kernels": {"k": GOOD | {"num_stages": "2"}}}), "k: num_warps must be"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN)
def test_a_broken_file_is_one_line_and_first_choices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    path = tmp_path / "sm86.json"
    path.write_text(text)
    with pytest.raises(PinError, match=reason.replace('"', ".")):
        read_pins(path)
    assert find_pins("sm86.json", [tmp_path]) == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.message
    assert reason in record.message
    assert "\n" not in record.message


def test_every_shipped_file_is_whole() -> None:
    from glm53srv.engine.cuda.pins import SHIPPED

    assert (SHIPPED / "README.md").is_file()  # the folder is where the wheel's files are expected
    for path in SHIPPED.glob("*.json"):
        assert read_pins(path), path
