"""Needles, against servers that read everything, forget the middle, or remember what they should not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.needle import main
from bench.report import FAILED, NOT_MEASURED, PASSED, run_command
from tests.bench.servers import Answer, Respond, chat_stream, serving

FACT = re.compile(r"the code of the ([a-z ]+) is (\d+)")
QUESTION = re.compile(r"What is the code of the ([a-z ]+)\?")


def reader(see: Callable[[str], str] = lambda text: text, *, remembers: bool = False) -> Respond:
    """Answer questions about the codes in what `see` leaves of the text. remembers: also of earlier texts."""
    known: dict[str, str] = {}

    def respond(method: str, path: str, body: bytes) -> Answer:
        if path != "/v1/chat/completions":
            return 404, b"{}"
        text = json.loads(body)["messages"][-1]["content"]
        document, _, question = text.rpartition("\n\n")
        facts = dict(FACT.findall(see(document)))
        known.update(facts)
        key = QUESTION.findall(question)[0]
        value = (known if remembers else facts).get(key)
        said = f"It is {value}." if value else "I do not know."
        return 200, chat_stream(said, prompt_tokens=max(len(text) // 4, 1))

    return respond


def run(respond: Respond, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    with serving(respond) as url:
        words = ["--url", url, "--tokens", "800", "--depths", "0", "0.5", "1", "--quiet"]
        code = run_command(main, [*words, "--out", str(out), *arguments])
    return code, json.loads(out.read_text()) if out.is_file() else {}


def test_a_server_that_reads_everything_passes(tmp_path: Path) -> None:
    code, document = run(reader(), tmp_path / "o")

    answers = document["result"]["answers"]
    assert code == PASSED
    assert [(answer["kind"], answer["depth"]) for answer in answers] == [
        ("depth", 0.0),
        ("depth", 0.5),
        ("depth", 1.0),
        ("reused", 0.25),
        ("reused", 0.6),
        ("after", 0.6),
    ]
    assert all(answer["is_good"] for answer in answers)
    assert all(700 < answer["prompt_tokens"] < 1000 for answer in answers[:-1])
    assert any("no second question was answered from a prefix cache" in note for note in document["notes"])


def test_a_server_that_forgets_the_middle_fails(tmp_path: Path) -> None:
    code, document = run(reader(lambda text: text[:300] + text[-300:]), tmp_path / "o")

    assert code == FAILED
    found = {(a["kind"], a["depth"]): a["is_good"] for a in document["result"]["answers"]}
    assert found[("depth", 0.0)]
    assert not found[("depth", 0.5)]
    assert found[("depth", 1.0)]


def test_a_fact_known_without_its_text_is_a_leak(tmp_path: Path) -> None:
    code, document = run(reader(remembers=True), tmp_path / "o")

    assert code == FAILED
    failed = [check["name"] for check in document["checks"] if not check["passed"]]
    assert failed == ["answers that knew a fact of an earlier request"]


def test_a_text_beyond_the_context_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = reader()

    def respond(method: str, path: str, body: bytes) -> Answer:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "m", "max_model_len": 1500}]}'
        return inner(method, path, body)

    code, document = run(respond, tmp_path / "o", "--tokens", "800", "5000")

    assert code == PASSED
    assert {answer["wanted_tokens"] for answer in document["result"]["answers"]} == {800}
    assert any("[5000] tokens do not fit" in note for note in document["notes"])
    assert run(respond, tmp_path / "p", "--tokens", "5000") == (NOT_MEASURED, {})
    assert "no text fits into 1300 tokens" in capsys.readouterr().err


def test_words_of_the_model_s_own_can_be_hidden(tmp_path: Path) -> None:
    respond = reader()
    code, document = run(respond, tmp_path / "o", "--values", "111", "222", "333")

    assert code == PASSED
    assert {answer["wanted"] for answer in document["result"]["answers"]} <= {"111", "222", "333"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("--fact", "nothing"), "must have {value}"), (("--values", "one"), "two or more")],
)
def test_a_wrong_wording_is_named(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(reader(), tmp_path / "o", *arguments)[0] == NOT_MEASURED
    assert reason in capsys.readouterr().err
