"""The panel against the CPU engine: it passes, and fails for every fault that it is there to find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import FAILED, NOT_MEASURED, PASSED, run_command
from bench.score_ref_panel import main
from tests.bench.servers import answers, lying, serving
from tests.e2e.server_process import ServerProcess
from tests.model.checkpoints import copy_model, read_file, write_file

DAMAGED = "model.language_model.layers.4.mlp.experts.7.down_proj.svh"


@pytest.fixture(scope="module")
def damaged_server(random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the random model with one expert of one layer silent: 1 of 7 x 32."""
    model_dir = copy_model(random_model_dir, tmp_path_factory.mktemp("damaged") / "model")
    weights = model_dir / "model.safetensors"
    header, data = read_file(weights)
    begin, end = header[DAMAGED]["data_offsets"]
    write_file(weights, header, data[:begin] + bytes(end - begin) + data[end:])
    with ServerProcess(model_dir) as process:
        yield process.url_when_ready()


def run(url: str, panel: Path, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Score a server; gives the exit code and the document, empty if none was written."""
    words = ["--url", url, "--panel", str(panel), "--out", str(out), "--quiet", *arguments]
    code = run_command(main, words)
    return code, json.loads(out.read_text()) if out.is_file() else {}


def failed_checks(document: dict[str, Any]) -> list[str]:
    return [check["name"] for check in document["checks"] if not check["passed"]]


def test_the_engine_that_made_a_panel_passes_it(server: str, panel_path: Path, tmp_path: Path) -> None:
    code, document = run(server, panel_path, tmp_path / "out.json")

    assert code == PASSED
    total = document["result"]["total"]
    assert total["top1"] == 1.0
    assert total["max_kl"] < 1e-4  # what the file's five decimals leave
    assert total["unlisted"] == 0
    assert total["positions"] == document["result"]["panel"]["positions"] > 500
    assert document["machine"]["cpu"]
    assert document["server_before"]["stats"]["status"] == "ready"
    served = document["server_after"]["stats"]["scheduler"]["total_requests"]
    assert served - document["server_before"]["stats"]["scheduler"]["total_requests"] == 8


def test_one_silent_expert_is_found(damaged_server: str, panel_path: Path, tmp_path: Path) -> None:
    code, document = run(damaged_server, panel_path, tmp_path / "out.json")

    assert code == FAILED
    assert failed_checks(document) == ["top-1 agreement", "mean KL in nats"]


def test_a_shift_by_one_token_is_found(server: str, panel_path: Path, tmp_path: Path) -> None:
    def shift(answer: dict[str, Any]) -> dict[str, Any]:
        tops = answer["meta_info"]["input_top_logprobs"]
        answer["meta_info"]["input_top_logprobs"] = [*tops[1:], tops[-1]]
        return answer

    with serving(lying(server, "/generate", shift)) as url:
        code, document = run(url, panel_path, tmp_path / "out.json")

    assert code == FAILED
    assert failed_checks(document) == ["top-1 agreement", "mean KL in nats"]
    assert document["result"]["total"]["top1"] < 0.2


def test_prompt_tokens_that_come_back_as_others_are_found(
    server: str, panel_path: Path, tmp_path: Path
) -> None:
    def shift(answer: dict[str, Any]) -> dict[str, Any]:
        tokens = answer["meta_info"]["input_token_logprobs"]
        answer["meta_info"]["input_token_logprobs"] = [*tokens[1:], tokens[-1]]
        return answer

    with serving(lying(server, "/generate", shift)) as url:
        code, document = run(url, panel_path, tmp_path / "out.json")

    assert code == FAILED
    assert failed_checks(document) == ["prompt tokens that came back as others"]


def test_another_template_is_found(server: str, panel_path: Path, tmp_path: Path) -> None:
    """A template that forgets the two tokens before the first turn."""

    def forget(answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "tokens": answer["tokens"][2:]}

    with serving(lying(server, "/tokenize", forget)) as url:
        code, document = run(url, panel_path, tmp_path / "out.json")

    assert code == FAILED
    assert "chats rendered into other tokens" in failed_checks(document)
    assert "mean KL in nats" in failed_checks(document)
    assert all(entry["has_own_prompt"] for entry in document["result"]["entries"])


def test_a_server_that_renders_no_chats_is_scored_on_the_panel_s_tokens(
    server: str, panel_path: Path, tmp_path: Path
) -> None:
    with serving(lying(server, "/tokenize", lambda answer: {"tokens": []})) as url:
        code, document = run(url, panel_path, tmp_path / "out.json")

    assert code == PASSED
    assert any("its template was not checked on 8" in note for note in document["notes"])


def test_a_server_without_generate_is_told_from_a_bad_one(
    panel_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answers({"/health": (200, b"{}")})) as url:
        code, document = run(url, panel_path, tmp_path / "out.json")

    assert code == NOT_MEASURED
    assert document == {}
    assert "cannot return log probabilities of a prompt: it has no /generate" in capsys.readouterr().err


def test_a_server_that_returns_no_log_probabilities_is_named(
    server: str, panel_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "meta_info": {"prompt_tokens": 3}}

    with serving(lying(server, "/generate", drop)) as url:
        code, _ = run(url, panel_path, tmp_path / "out.json")

    assert code == NOT_MEASURED
    assert "cannot return log probabilities" in capsys.readouterr().err


def test_a_panel_of_another_model_is_named(
    server: str, panel_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(panel_path.read_text())
    content["entries"] = [{**content["entries"][0], "chat": None}]
    content["entries"][0]["ids"][0] = 150_000
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))

    code, _ = run(server, other, tmp_path / "out.json")

    assert code == NOT_MEASURED
    assert "the panel does not fit this server" in capsys.readouterr().err
