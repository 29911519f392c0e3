"""Mixed load: short and real, then what its watch makes of samples, and a server that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.mixed_load import Sample, growth_mib, main
from bench.report import FAILED, NOT_MEASURED, PASSED, run_command
from tests.bench.servers import lying, serving

MIB = 2**20
SHORT = ["--minutes", "0.03", "--workers", "3", "--max-prompt", "200", "--max-output", "8", "--quiet"]


def run(url: str, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_command(main, ["--url", url, "--out", str(out), *SHORT, "--watch-s", "0.3", *arguments])
    return code, json.loads(out.read_text()) if out.is_file() else {}


def samples(memory_mib: list[int]) -> list[Sample]:
    return [Sample(10.0 * at, 0, 0, 0, value * MIB) for at, value in enumerate(memory_mib)]


def test_growth_counts_from_the_settled_part_on() -> None:
    filling = [10, 60, 100, 100, 100, 101, 100, 101, 101, 101, 101]
    leaking = [10 + 20 * at for at in range(11)]

    assert growth_mib(samples(filling)) == 1.0
    assert growth_mib(samples(leaking)) == 120.0
    assert growth_mib(samples([10, 20])) is None


def test_a_sound_server_passes_and_rests_afterwards(server: str, tmp_path: Path) -> None:
    # the memory watched here is this process's own: what matters is that it is read
    code, document = run(server, tmp_path / "o", "--pid", str(os.getpid()))

    assert code == PASSED, document
    names = [check["name"] for check in document["checks"]]
    assert names == [
        "failed requests",
        "growth of memory in MiB",
        "sequences that run afterwards",
        "sequences that wait afterwards",
        "pages held afterwards",
    ]
    assert sum(document["result"]["requests"].values()) >= 3
    fields = document["result"]["sample_fields"]
    running = [sample[fields.index("num_running")] for sample in document["result"]["samples"]]
    assert 0 < max(running) <= 4


def test_a_server_that_keeps_pages_fails(server: str, tmp_path: Path) -> None:
    asked: list[int] = []

    def hold(pages: dict[str, Any]) -> dict[str, Any]:
        asked.append(1)
        pages["scheduler"]["num_pages_used"] += 0 if len(asked) <= 2 else 5
        return pages

    with serving(lying(server, "/stats", hold)) as url:
        code, document = run(url, tmp_path / "o", "--minutes", "0.01")

    assert code == FAILED
    assert [c["name"] for c in document["checks"] if not c["passed"]] == ["pages held afterwards"]


def test_requests_that_fail_are_counted(server: str, tmp_path: Path) -> None:
    def respond(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/v1/chat/completions":
            return 500, b'{"error": {"message": "broken"}}'
        return passing(method, path, body)

    passing = lying(server, "", lambda value: value)
    first_is_a_chat = ("--workers", "1", "--seed", "7")  # however little a busy machine does in the time
    with serving(respond) as url:
        code, document = run(url, tmp_path / "o", *first_is_a_chat)

    assert code == FAILED
    assert document["result"]["problems"]
    assert all("broken" in problem for problem in document["result"]["problems"])


def test_a_process_that_is_not_there_is_named(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, tmp_path / "o", "--pid", str(2**22 + 1))[0] == NOT_MEASURED
    assert "no such process" in capsys.readouterr().err
