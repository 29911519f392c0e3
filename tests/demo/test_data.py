"""The generated data: right answers, a clean split, and what is learned of it."""

from __future__ import annotations

import random
import re

import pytest

from reference.demo import tasks
from reference.demo.cases import CATEGORIES, held_out_case, held_out_cases
from reference.demo.dialogue import training_conversation
from reference.demo.rendering import LossMask, load_template, render_training_text
from reference.demo.sample import Draw, is_held_out
from reference.demo.tools import TOOLS, Tool, request_for


def test_the_same_seed_gives_the_same_conversation() -> None:
    assert training_conversation(7) == training_conversation(7)
    assert training_conversation(7) != training_conversation(8)


@pytest.mark.parametrize("category", CATEGORIES)
def test_held_out_cases_exist_in_any_number_and_repeat(category: str) -> None:
    cases = [held_out_case(category, number) for number in range(300)]

    assert len({repr(case) for case in cases}) > 10
    assert cases[3] == held_out_case(category, 3)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_each_tool_has_requests_on_both_sides_of_the_split(tool: Tool) -> None:
    for held_out in (False, True):
        request = request_for(Draw(random.Random(1), held_out), tool)

        assert is_held_out(request.key) == held_out
        assert request.call.name == tool.name
        assert set(request.call.arguments) <= set(tool.parameters["properties"])


def test_held_out_sums_are_never_trained_on() -> None:
    held = {case.turn.user for case in held_out_cases(200) if case.category == "arithmetic"}
    pairs = {match.groups() for text in held if (match := re.search(r"(\d+) ?\+ ?(\d+)", text))}
    assert pairs

    seen = set()
    for seed in range(3000):
        for turn in training_conversation(seed).turns:
            seen |= {match.groups() for match in re.finditer(r"(\d+) ?\+ ?(\d+)", turn.user)}

    assert len(seen) > 200
    assert not seen & pairs


def test_held_out_wordings_of_facts_are_never_trained_on() -> None:
    held = {case.turn.user for case in held_out_cases(300) if case.category == "facts"}

    trained = {turn.user for seed in range(3000) for turn in training_conversation(seed).turns}

    assert len(held) > 100
    assert not held & trained


SUMS = ((47, "+", 38), (99, "+", 99), (83, "-", 45), (40, "-", 10), (7, "*", 8))


@pytest.mark.parametrize(("a", "operator", "b"), SUMS)
def test_thoughts_about_sums_are_true(a: int, operator: str, b: int) -> None:
    for step in tasks.explain_sum(a, operator, b).rstrip(".").split(", "):
        left, _, right = step.partition(" = ")
        x, sign, y = left.split(" ")
        assert tasks.compute(int(x), sign, int(y)) == int(right)


ASSISTANT, THINK, END_THINK, USER = 1, 2, 3, 9


def test_an_answer_and_its_stop_are_learned_after_an_open_reasoning() -> None:
    mask = LossMask(ASSISTANT, [USER], THINK, END_THINK)

    learned = mask.mark([USER, 50, ASSISTANT, THINK, 60, END_THINK, 61, USER, 51, ASSISTANT])

    assert [place for place, flag in enumerate(learned) if flag] == [4, 5, 6, 7]


def test_closing_the_reasoning_at_once_is_the_prompts_doing() -> None:
    mask = LossMask(ASSISTANT, [USER], THINK, END_THINK)

    learned = mask.mark([USER, ASSISTANT, THINK, END_THINK, 61, USER])

    assert [place for place, flag in enumerate(learned) if flag] == [4, 5]


def test_a_conversation_renders_every_turn_and_ends_with_a_stop() -> None:
    conversation = training_conversation(11)

    text = render_training_text(load_template(), conversation)

    assert text.endswith(conversation.turns[-1].answer + "<|user|>")
    assert all(turn.user in text for turn in conversation.turns)
