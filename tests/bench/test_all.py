"""All checks by one command: its own server, its summary, its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.all import Outcome, finish, main
from bench.report import FAILED, NOT_MEASURED, PASSED, open_report, run_command
from tests.bench.servers import answers, serving


def test_a_short_run_starts_a_server_and_sums_up(random_model_dir: Path, tmp_path: Path) -> None:
    words = ["--model", str(random_model_dir), "--out", str(tmp_path), "--short"]

    code = run_command(main, [*words, "--only", "score_ref_panel", "needle", "decode_kl"])

    summary = json.loads((tmp_path / "summary.json").read_text())
    outcomes = {step["name"]: step for step in summary["result"]["steps"]}
    assert code == PASSED
    assert list(outcomes) == ["score_ref_panel", "needle", "decode_kl"]
    assert outcomes["score_ref_panel"]["code"] == outcomes["decode_kl"]["code"] == PASSED
    assert outcomes["needle"]["code"] is None
    assert "random" in outcomes["needle"]["reason"]
    assert summary["result"]["server"]["exit_code"] == 0
    assert summary["result"]["server"]["memory_at_end"]["peak_bytes"] > 10 * 2**20
    assert json.loads((tmp_path / "score_ref_panel.json").read_text())["passed"]
    assert "ready" in (tmp_path / "server.log").read_text()


def test_a_short_run_on_the_demo_model_asks_it_questions_too(
    demo_model_dir: Path, demo_panel_path: Path, tmp_path: Path
) -> None:
    words = [
        "--model",
        str(demo_model_dir),
        "--panel",
        str(demo_panel_path),
        "--out",
        str(tmp_path),
        "--short",
    ]

    code = run_command(main, [*words, "--only", "score_ref_panel", "needle", "mixed_load", "decode_kl"])

    steps = json.loads((tmp_path / "summary.json").read_text())["result"]["steps"]
    assert code == PASSED
    assert [step["code"] for step in steps] == [PASSED] * 4
    assert json.loads((tmp_path / "needle.json").read_text())["passed"]


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([PASSED, None], PASSED),
        ([PASSED, NOT_MEASURED], NOT_MEASURED),
        ([NOT_MEASURED, FAILED, PASSED], FAILED),
        ([PASSED, -9], NOT_MEASURED),
    ],
)
def test_the_worst_step_decides(codes: list[int | None], worst: int, tmp_path: Path) -> None:
    outcomes = [Outcome(str(at), code) for at, code in enumerate(codes)]

    assert finish(open_report("all", []), outcomes, tmp_path / "summary.json") == worst


def test_a_step_that_fails_is_told_from_one_that_could_not_run(tmp_path: Path, panel_path: Path) -> None:
    with serving(answers({"/health": (200, b"{}")})) as url:
        words = ["--url", url, "--panel", str(panel_path), "--out", str(tmp_path), "--short"]
        code = run_command(main, [*words, "--only", "score_ref_panel", "decode_kl"])

    assert code == NOT_MEASURED
    assert "has no /generate" in (tmp_path / "score_ref_panel.log").read_text()


def test_a_model_that_cannot_be_served_is_named(
    tmp_path: Path, panel_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(tmp_path / "none"), "--panel", str(panel_path), "--out", str(tmp_path / "o")]

    assert run_command(main, words) == NOT_MEASURED
    assert "no such directory" in capsys.readouterr().err


def test_without_a_model_or_a_server_there_is_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, ["--out", str(tmp_path)]) == NOT_MEASURED
    assert "give --model" in capsys.readouterr().err
