"""Documents, tables, checks and exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.errors import BadInput
from bench.report import FAILED, PASSED, Check, close_report, open_report, read_result, spread, table


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "passed"),
    [
        (1.0, 1.0, True, True),
        (0.99, 1.0, True, False),
        (1.0, 1.0, False, True),
        (1.01, 1.0, False, False),
        (math.nan, 1.0, True, False),
        (math.nan, 1.0, False, False),
    ],
)
def test_a_check_passes_on_its_side_of_the_limit(
    value: float, limit: float, at_least: bool, passed: bool
) -> None:
    assert Check("x", value, limit, at_least=at_least).passed is passed


def test_a_report_is_read_back_and_its_checks_give_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    report = open_report("sweep", ["--api-key", "s3cret", "--api-key=s3cret"], secret="s3cret")
    report.checks.append(Check("x", 1.0, 2.0))
    assert close_report(report, path, "") == PASSED
    report.checks.append(Check("y", 3.0, 2.0))
    assert close_report(report, path, "") == FAILED

    document = read_result(path, "sweep")

    assert [check["passed"] for check in document["checks"]] == [True, False]
    assert not document["passed"]
    assert document["command"] == ["bench.sweep", "--api-key", "***", "--api-key=***"]
    assert "s3cret" not in path.read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x", "not JSON"),
        ("{}", "not a result"),
        ('{"format": "glm53srv-bench-1", "tool": "soak"}', "of soak"),
    ],
)
def test_another_file_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)

    with pytest.raises(BadInput, match=reason):
        read_result(path, "sweep")


def test_a_spread_keeps_every_value() -> None:
    assert json.loads(json.dumps(spread([3.0, 1.0, 2.0]))) == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "all": [3.0, 1.0, 2.0],
    }


def test_a_table_is_aligned() -> None:
    assert table(["name", "n"], [["a", 1], ["bcd", 1000]]).splitlines() == [
        "name     n",
        "----  ----",
        "a        1",
        "bcd   1000",
    ]
