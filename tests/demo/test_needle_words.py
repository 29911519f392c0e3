"""The words for bench/needle.py are those that the generators give today."""

from __future__ import annotations

from pathlib import Path

from bench.needle_texts import read_dialogue
from reference.demo.needle_dialogue import NUM_TURNS, as_text

PATH = Path(__file__).resolve().parents[2] / "reference" / "demo" / "needle.json"


def test_the_file_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == as_text()


def test_it_is_a_dialogue() -> None:
    dialogue = read_dialogue(PATH)
    assert len(dialogue.turns) == NUM_TURNS
    assert len(dialogue.values) == 5
