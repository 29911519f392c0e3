"""Paired decode over the CPU engine: the control is exactly 0, another arithmetic is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.decode_kl import main
from bench.report import FAILED, NOT_MEASURED, PASSED, run_command


def run(model_dir: Path, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    words = ["--model", str(model_dir), "--sequences", "3", "--streams", "2", "--tokens", "6", "--quiet"]
    code = run_command(main, [*words, "--out", str(out), *arguments])
    return code, json.loads(out.read_text()) if out.is_file() else {}


def test_a_setting_is_no_distance_from_itself_and_another_is(random_model_dir: Path, tmp_path: Path) -> None:
    # a random model's logits stand on knife edges, so the thresholds of a trained one do not hold for it
    code, document = run(
        random_model_dir, tmp_path / "o", "--b=precision=fast16", "--max-kl=1", "--min-top1=0"
    )

    result = document["result"]
    assert code == PASSED
    assert result["a_against_a"]["positions"] == result["a_against_b"]["positions"] == 18
    assert result["a_against_a"]["max_kl"] == 0.0
    assert result["a_against_a"]["top1"] == 1.0
    assert 0.0 < result["a_against_b"]["mean_kl"] < 0.5


def test_a_difference_beyond_the_threshold_fails(random_model_dir: Path, tmp_path: Path) -> None:
    code, document = run(
        random_model_dir, tmp_path / "o", "--b=precision=fast16", "--max-kl=1e-12", "--min-top1=0"
    )

    assert code == FAILED
    assert [c["name"] for c in document["checks"] if not c["passed"]] == ["mean KL in nats"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--b=fast16",), "write name=value"),
        (("--b=precison=fast16",), "did you mean --precision"),
        (("--a=cache-tokens=256",), "raise --cache-tokens"),
    ],
)
def test_a_wrong_setting_is_named(
    arguments: tuple[str, ...],
    reason: str,
    random_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(random_model_dir, tmp_path / "o", *arguments)[0] == NOT_MEASURED
    assert reason in capsys.readouterr().err
