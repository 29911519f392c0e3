"""The questions that evaluate.py sends and how it reads the answers."""

from __future__ import annotations

import pytest

from reference.demo.cases import held_out_case
from reference.demo.evaluate import Verdict, calls_of, question_of, shares


@pytest.mark.parametrize("category", ["facts", "memory", "tools"])
def test_the_question_ends_with_the_last_user_message(category: str) -> None:
    case = held_out_case(category, 2)

    body = question_of(case.conversation)

    assert body["messages"][-1] == {"role": "user", "content": case.turn.user}
    assert ("tools" in body) == (category == "tools")


def test_calls_are_read_with_typed_arguments() -> None:
    message = {"tool_calls": [{"function": {"name": "f", "arguments": '{"n": 2, "on": true}'}}]}

    assert calls_of(message) == [("f", {"n": 2, "on": True})]


def test_broken_arguments_stay_text() -> None:
    assert calls_of({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}) == [("f", "{")]


def test_shares_count_right_answers_per_category_and_stops_over_all() -> None:
    verdicts = [
        Verdict("facts", True, True, "a", "a"),
        Verdict("facts", False, True, "a", "b"),
        Verdict("chat", True, False, "a", "a"),
    ]

    assert shares(verdicts) == {"facts": 0.5, "chat": 1.0, "stops": pytest.approx(2 / 3)}
