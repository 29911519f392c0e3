"""Write needle.json, the words in which bench/needle.py can talk to the demo model: it reads chats only.

python -m reference.demo.needle_dialogue reference/demo/needle.json
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from reference.demo import world
from reference.demo.dialogue import plain_turn
from reference.demo.sample import Draw, JsonObject

NUM_TURNS = 120
LONGEST_ANSWER = 120
"""In characters: stories would fill a short chat alone."""


def needle_dialogue() -> JsonObject:
    """Give what bench.needle_texts.Dialogue reads; turns from the held-out side."""
    draw = Draw(random.Random("needle"), held_out=True)
    turns: list[tuple[str, str]] = []
    while len(turns) < NUM_TURNS:
        turn = plain_turn(draw)
        if len(turn.answer) <= LONGEST_ANSWER:
            turns.append((turn.user, turn.answer))
    values = {key: list(values) for key, values in world.PREFERENCES.items()}
    values["lucky number"] = [value for value in values["lucky number"] if len(value) == 2]  # 7 stands in 17
    return {
        "tell": "My {key} is {value}.",
        "reply": "I will remember that your {key} is {value}.",
        "question": "What is my {key}?",
        "values": values,
        "turns": turns,
    }


def as_text() -> str:
    """Give the file's content."""
    return json.dumps(needle_dialogue(), ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_text(), encoding="utf-8")
