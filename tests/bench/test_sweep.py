"""The sweep in short form against the CPU engine: what it reports, and that it agrees with the server."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import FAILED, NOT_MEASURED, PASSED, run_command
from bench.sweep import main
from tests.bench.servers import answers, lying, serving

SHORT = [
    *("--prefill", "128", "100000", "--ttft", "16", "--conc", "1", "2", "--reps", "2", "--dec-reps", "1"),
    *(
        "--deep",
        "96",
        "--deep-tokens",
        "8",
        "--turn",
        "64",
        "--beside",
        "128",
        "--max-tokens",
        "24",
        "--quiet",
    ),
]

FEW = ["--prefill", "64", "--ttft", "--conc", "--deep", "0", "--turn", "0", "--beside", "0"]


def run(url: str, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_command(main, ["--url", url, "--out", str(out), *SHORT, *arguments])
    return code, json.loads(out.read_text()) if out.is_file() else {}


@pytest.fixture(scope="module")
def swept(server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    # clocks may differ by any amount on a busy machine; tokens may not
    return run(
        server, tmp_path_factory.mktemp("sweep") / "out.json", "--max-disagreement", "0.0", "--card", "x"
    )


def test_every_part_is_measured(swept: tuple[int, dict[str, Any]]) -> None:
    metrics = swept[1]["result"]["metrics"]

    assert list(metrics) == [
        "first token after 16",
        "prefill 128",
        *(f"decode C1{part}" for part in ("", " after first", " per stream")),
        *(f"decode C2{part}" for part in ("", " after first", " per stream")),
        "decode C1 at 96",
        "turn of 64, first",
        "turn of 64, second",
        *(f"beside prefill 128, {part}" for part in ("alone", "during", "longest gap")),
    ]
    assert all(0 <= m["min"] <= m["median"] <= m["max"] for m in metrics.values())
    assert len(metrics["prefill 128"]["all"]) == 2
    assert any("100000 tokens do not fit" in note for note in swept[1]["notes"])
    assert any("cut at 24 tokens" in note for note in swept[1]["notes"])


def test_tokens_are_those_that_the_server_counted(swept: tuple[int, dict[str, Any]]) -> None:
    checks = [check for check in swept[1]["checks"] if "tokens" in check["name"]]

    assert [check["name"].split(":")[0] for check in checks] == ["prompt tokens", "output tokens"]
    assert all(check["passed"] and check["limit"] == 0.0 for check in checks)


def test_a_server_that_counts_wrongly_is_found(server: str, tmp_path: Path) -> None:
    reads = itertools.count()

    def forget(pages: dict[str, Any]) -> dict[str, Any]:
        scheduler = pages["scheduler"]
        # A tenth of a few tokens may be none in whole numbers, so each look forgets one more.
        scheduler["total_output_tokens"] = 1000 + scheduler["total_output_tokens"] * 9 // 10 - next(reads)
        return pages

    with serving(lying(server, "/stats", forget)) as url:
        code, document = run(url, tmp_path / "out.json", *FEW, "--conc", "1", "--max-disagreement", "0.05")

    failed = [check["name"] for check in document["checks"] if not check["passed"]]
    assert code == FAILED
    assert any(name.startswith("output tokens:") for name in failed)
    assert not any(name.startswith("prompt tokens:") for name in failed)


def test_chats_in_the_published_format_go_through_generate(server: str, tmp_path: Path) -> None:
    code, document = run(server, tmp_path / "out.json", *FEW, "--conc", "1", "--template", "glm")

    (only,) = document["result"]["rounds"]["decode C1"]
    assert code == PASSED
    assert document["result"]["template"] == "glm"
    assert 0 < only["completion_tokens"][0] <= 24
    assert only["server_per_stream"] == []  # that wire tells no times of the server


def test_a_metric_below_the_best_known_ends_the_sweep(server: str, tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    best.write_text(json.dumps({"x": {"prefill 128": 1e9}, "y": {}}))

    code, document = run(server, tmp_path / "out.json", "--best", str(best), "--card", "x")

    assert code == FAILED
    assert list(document["result"]["metrics"]) == ["first token after 16", "prefill 128"]
    assert any("ended early" in note for note in document["notes"])


def test_a_server_that_is_down_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answers({})) as url:
        pass

    assert run(url, tmp_path / "out.json")[0] == NOT_MEASURED
    assert "does not answer" in capsys.readouterr().err


HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is optional and not installed")
def test_a_plot_is_drawn(server: str, tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"

    assert run(server, tmp_path / "out.json", *FEW, "--plot", str(picture))[0] == PASSED
    assert picture.stat().st_size > 0


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run("http://127.0.0.1:1", tmp_path / "out.json", *FEW, "--plot", "plot.png")

    assert (code, document) == (NOT_MEASURED, {})
    assert "needs matplotlib" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, ["--url", server, "--out", str(tmp_path), "--quiet"]) == NOT_MEASURED
    assert "cannot be written" in capsys.readouterr().err
