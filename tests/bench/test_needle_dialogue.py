"""Needles in a chat of many turns, and what a guess may not count for."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BadInput
from bench.needle import main
from bench.needle_texts import Dialogue, read_dialogue
from bench.report import FAILED, PASSED, run_command
from tests.bench.servers import Answer, Respond, chat_stream, serving

COLOURS = ("green", "blue", "pink", "white")
DIALOGUE = Dialogue(
    tell="My {key} is {value}.",
    reply="Your {key} is {value}: noted.",
    question="What is my {key}?",
    values={"colour": COLOURS, "second colour": COLOURS},
    turns=(("Hello", "Hi!"), ("What is 2 + 2?", "2 + 2 = 4")),
)


def test_facts_are_turns_at_their_depths_and_all_turns_alternate() -> None:
    messages = DIALOGUE.write(
        random.Random(1), 400, [(0.0, "colour", "pink"), (1.0, "second colour", "blue")]
    )

    assert messages[0] == {"role": "user", "content": "My colour is pink."}
    assert messages[-1] == {"role": "assistant", "content": "Your second colour is blue: noted."}
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    assert 400 <= sum(len(message["content"]) for message in messages[2:-2]) < 430


def test_what_the_model_says_unread_is_never_hidden() -> None:
    guesses = {"colour": "It is white.", "second colour": "Blue, I think."}
    for seed in range(50):
        drawn = dict(DIALOGUE.draw(random.Random(seed), 2, guesses))
        assert drawn["colour"] != "white"
        assert drawn["second colour"] != "blue"
        assert len(set(drawn.values())) == 2


def reader(*, remembers: bool) -> Respond:
    """Answer from the chat; guess "white" where nothing was told. remembers: also earlier chats."""
    known: dict[str, str] = {}

    def respond(method: str, path: str, body: bytes) -> Answer:
        if path != "/v1/chat/completions":
            return 404, b"{}"
        messages: list[dict[str, Any]] = json.loads(body)["messages"]
        facts: dict[str, str] = {}
        for message in messages:
            if told := re.fullmatch(r"My (.+) is (.+)\.", message["content"]):
                facts[told[1]] = told[2]
        known.update(facts)
        asked = re.fullmatch(r"What is my (.+)\?", messages[-1]["content"])
        value = (known if remembers else facts).get(asked[1] if asked else "", "white")
        length = sum(len(message["content"]) for message in messages)
        return 200, chat_stream(f"Your colour is {value}.", prompt_tokens=max(length // 4, 1))

    return respond


@pytest.mark.parametrize(("remembers", "expected"), [(False, PASSED), (True, FAILED)])
def test_a_chat_s_facts_are_found_and_leaks_are_too(remembers: bool, expected: int, tmp_path: Path) -> None:
    path, out = tmp_path / "dialogue.json", tmp_path / "o"
    path.write_text(
        json.dumps(
            {
                "tell": DIALOGUE.tell,
                "reply": DIALOGUE.reply,
                "question": DIALOGUE.question,
                "values": DIALOGUE.values,
                "turns": DIALOGUE.turns,
            }
        )
    )
    assert read_dialogue(path) == DIALOGUE
    with serving(reader(remembers=remembers)) as url:
        words = ["--url", url, "--tokens", "300", "--depths", "0", "1", "--dialogue", str(path)]
        code = run_command(main, [*words, "--quiet", "--out", str(out)])

    answers = json.loads(out.read_text())["result"]["answers"]
    assert code == expected
    assert all(answer["is_good"] for answer in answers if answer["kind"] != "after")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[", "not a dialogue file"),
        ("[]", "not a dialogue file"),
        ('{"tell": "", "reply": "", "question": "", "values": {}, "turns": []}', "needs turns"),
    ],
)
def test_a_wrong_file_is_named(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=reason):
        read_dialogue(path)
