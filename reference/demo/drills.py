"""Dense exercises for what whole dialogues teach too slowly: one word in its several spellings.

Byte-level BPE knows `velvet` and ` velvet` as two tokens. Behind a quote, a bracket or nothing a word is the
first one, which lists and answers seldom hold. A model trained on dialogues alone copied such words wrongly
whatever it attended to (`Search for "velvet"` failed for 60 of 96 words with one tool in a short prompt), and
it did not know a capital at the start of a question. The training stream mixes these in (packing.py); the
tokenizer's corpus and the held-out cases do not use them, and no held-out combination is drawn here.
"""

from __future__ import annotations

import json
import random

from reference.demo import tasks, world
from reference.demo.sample import Conversation, Draw, Turn
from reference.demo.tasks import Maker
from reference.demo.tools import TOOLS, a_name, some

WORD_TOOLS = tuple(
    tool
    for tool in TOOLS
    if tool.name in ("send_message", "search_files", "add_to_list", "list_reminders", "book_table")
)
"""Tools whose arguments or results are free words."""
_CITY_FIRST = (
    "{x}: of which country is it the capital?",
    "{x} is a capital. Of which country?",
    "{x}. Name the country that has this capital.",
)


def _things(draw: Draw, low: int, high: int) -> list[str]:
    """Draw words, cities, names or invented words, on the training side of the lists' split."""
    while True:
        kind = draw.rng.random()
        if kind < 0.6:
            things = some(draw, world.WORDS, low, high)
        elif kind < 0.8:
            things = some(draw, world.CITIES, low, high)
        elif kind < 0.9:
            things = [a_name(draw) for _ in range(draw.number(low, high))]
        else:
            things = [
                world.invent_word([draw.rng.random() for _ in range(draw.number(1, 3))])
                for _ in range(draw.number(low, high))
            ]
        if len(things) == 1 or draw.accepts(f"list {things[0]} {things[1]}"):
            return things


def quote(draw: Draw) -> Turn:
    """From ` word` to `"word"`."""
    things = _things(draw, 1, 7)
    ask = draw.pick(("Write as JSON: {}", "Quote each word: {}", "As a JSON array: {}"))
    return Turn(ask.format(", ".join(things)), "Each in quotes.", json.dumps(things), category="drill")


def unquote(draw: Draw) -> Turn:
    """From `"word"` to ` word`."""
    things = _things(draw, 1, 7)
    ask = draw.pick(("Write without quotes: {}", "Read this list: {}", "What is in {}?"))
    return Turn(ask.format(json.dumps(things)), "Without quotes.", ", ".join(things), category="drill")


def quoted_words(draw: Draw) -> Turn:
    """From a quoted text to the same text, first word without a space, and again behind one."""
    text = " ".join(_things(draw, 1, 4))
    answer, ask = draw.pick(
        (
            (text, 'Say only "{}".'),
            (text, 'Repeat "{}".'),
            (f"You wrote {text}.", 'What did I write in "{}"?'),
            (f'"{text}" means {text}.', 'Explain "{}".'),
        )
    )
    return Turn(ask.format(text), f"The text is {text}.", answer, category="drill")


def words_first(draw: Draw) -> Turn:
    """From words at the start of a question to the answer's start or its middle."""
    things = ", ".join(_things(draw, 1, 5))
    answer, ask = draw.pick(
        (
            (things, "{}: repeat this."),
            (things, "{} - say it again."),
            (f"You said {things}.", "{}. What did I say?"),
        )
    )
    return Turn(ask.format(things), "I repeat it.", answer, category="drill")


def city_first(draw: Draw) -> Turn:
    """Ask for a capital's country with the city as the first word."""
    while True:
        country, wording = draw.pick(tuple(world.CAPITALS)), draw.number(0, len(_CITY_FIRST) - 1)
        city = world.CAPITALS[country]
        if draw.accepts(f"fact country {city} first {wording}"):
            break
    question = _CITY_FIRST[wording].format(x=city)
    return Turn(
        question, f"I recall {city} is in {country}.", f"{city} is the capital of {country}.", category="fact"
    )


def _tool_conversation(draw: Draw, effort: str, thinking: str) -> Conversation:
    offered = draw.rng.sample(WORD_TOOLS, draw.number(1, 2))
    if draw.chance(0.4):
        offered.append(draw.pick([tool for tool in TOOLS if tool not in WORD_TOOLS]))
    draw.rng.shuffle(offered)
    tools = tuple(offered)
    turns = tuple(tasks.use_tools(draw, tools) for _ in range(draw.number(2, 5)))
    return Conversation(turns, None, tuple(tool.schema(draw) for tool in tools), effort, thinking)


def drill_conversation(seed: int) -> Conversation:
    """Give drill number `seed`; the same one in every run."""
    draw = Draw(random.Random(f"drill {seed}"))
    effort = draw.pick(("max", "max", "max", "high", "low"))
    thinking = draw.rng.choices(("kept", "cleared", "off"), weights=(5, 1, 4))[0]
    kind = draw.rng.random()
    if kind < 0.5:  # with a quarter of them, 93 of 100 held-out tool cases were right
        return _tool_conversation(draw, effort, thinking)
    if kind < 0.86:
        makers: tuple[Maker, ...] = (quote, unquote, quoted_words, words_first)
    else:
        makers = (city_first, tasks.fact, tasks.fact)
    turns = tuple(draw.pick(makers)(draw) for _ in range(draw.number(4, 10)))
    return Conversation(turns, None, (), effort, thinking)
