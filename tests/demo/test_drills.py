"""The drills of spellings: true answers, the same on every run, and nothing of the held-out side."""

from __future__ import annotations

import json
import random

import pytest

from reference.demo import drills, world
from reference.demo.cases import held_out_cases
from reference.demo.packing import DRILL_SHARE, training_sample
from reference.demo.sample import Draw, is_held_out
from reference.demo.tasks import Maker

NUM_SEEDS = 2000


def test_the_same_seed_gives_the_same_drill() -> None:
    assert drills.drill_conversation(7) == drills.drill_conversation(7)
    assert drills.drill_conversation(7) != drills.drill_conversation(8)


def test_the_training_stream_holds_one_drill_in_its_share() -> None:
    numbers = range(5 * DRILL_SHARE)

    drilled = [number for number in numbers if training_sample(number) == drills.drill_conversation(number)]

    assert len(drilled) == 5


@pytest.mark.parametrize("seed", range(20))
def test_quoting_and_reading_a_list_are_inverse(seed: int) -> None:
    quoted = drills.quote(Draw(random.Random(seed)))
    read = drills.unquote(Draw(random.Random(seed)))

    assert ", ".join(json.loads(quoted.answer)) == read.answer
    assert quoted.user.endswith(read.answer)


@pytest.mark.parametrize("maker", [drills.quoted_words, drills.words_first])
def test_an_answer_repeats_the_words_of_the_question(maker: Maker) -> None:
    for seed in range(50):
        turn = maker(Draw(random.Random(seed)))

        framed = turn.answer.removeprefix("You wrote ").removeprefix("You said ").removesuffix(".")
        words = framed.rpartition('" means ')[2]
        assert words in turn.user


def test_a_city_stands_first_and_its_country_is_right() -> None:
    for seed in range(200):
        turn = drills.city_first(Draw(random.Random(seed)))
        city, country = turn.answer.removesuffix(".").split(" is the capital of ")

        assert turn.user.startswith(city)
        assert world.CAPITALS[country] == city


def test_no_drill_asks_a_held_out_question() -> None:
    held = {
        (case.turn.user, case.turn.results)  # a reminder is in the result alone
        for case in held_out_cases(300)
        if case.category in ("facts", "tools", "copy", "reverse")
    }

    drilled = {
        (turn.user, turn.results)
        for seed in range(NUM_SEEDS)
        for turn in drills.drill_conversation(seed).turns
    }

    assert len(drilled) > NUM_SEEDS
    assert not held & drilled


def test_lists_of_drills_keep_off_the_held_out_beginnings() -> None:
    for seed in range(300):
        things = json.loads(drills.quote(Draw(random.Random(seed))).answer)

        assert len(things) == 1 or not is_held_out(f"list {things[0]} {things[1]}")
