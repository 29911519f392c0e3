"""The held-out evaluation: cases by category, made on the other side of the split that training uses."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from reference.demo import dialogue, tasks
from reference.demo.sample import Conversation, Draw, Turn
from reference.demo.tools import TOOLS

CATEGORIES = ("facts", "arithmetic", "copy", "reverse", "style", "memory", "tools", "unknown", "chat")


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation whose last turn is asked of the model and scored."""

    category: str
    conversation: Conversation

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[-1]


def _turns(draw: Draw, category: str) -> tuple[list[Turn], str | None]:
    """Make the turns and the system prompt of a case."""
    if category == "facts":
        return [tasks.fact(draw)], None
    if category == "arithmetic":
        return [tasks.arithmetic(draw) if draw.chance(0.75) else tasks.word_problem(draw)], None
    if category == "copy":
        return [draw.pick((tasks.copy_list, tasks.pick_from_list, tasks.count))(draw)], None
    if category == "reverse":
        return [tasks.reverse_list(draw)], None
    if category == "memory":
        return dialogue.memory_turns(draw, draw.number(0, 4)), None
    if category == "unknown":
        return [tasks.unknown_fact(draw)], None
    if category == "chat":
        return [draw.pick((tasks.chat, tasks.story))(draw)], None
    if draw.chance(0.5):
        german = draw.chance(0.5)
        prompts = dialogue.GERMAN_PROMPTS if german else dialogue.FRENCH_PROMPTS
        return [dialogue.foreign_turn(draw, german)], draw.pick(prompts)
    style = draw.pick(dialogue.STYLES)
    turn = draw.pick((tasks.fact, tasks.arithmetic))(draw)
    return [replace(turn, answer=style.apply(turn.answer))], draw.pick(style.prompts)


def held_out_case(category: str, number: int) -> Case:
    """Give case `number` of a category; the same one in every run. Odd numbers close the reasoning at
    once."""
    draw = Draw(random.Random(f"held out {category} {number}"), held_out=True)
    thinking = "kept" if number % 2 == 0 else "off"
    if category == "tools":
        offered = tuple(draw.rng.sample(TOOLS, draw.number(1, 5)))
        turns, system = [tasks.use_tools(draw, offered)], None
        schemas = tuple(tool.schema(draw) for tool in offered)
        return Case(category, Conversation(tuple(turns), system, schemas, "max", thinking))
    turns, system = _turns(draw, category)
    return Case(category, Conversation(tuple(turns), system, (), "max", thinking))


def held_out_cases(per_category: int) -> list[Case]:
    return [held_out_case(category, number) for category in CATEGORIES for number in range(per_category)]
