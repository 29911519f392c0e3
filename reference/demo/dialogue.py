"""Whole conversations from single exchanges, under a system prompt that may ask for a language or a style."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from reference.demo import tasks, world
from reference.demo.sample import Conversation, Draw, Turn
from reference.demo.tools import TOOLS, Tool, a_name


@dataclass(frozen=True, slots=True)
class Style:
    """A way of answering. prompts: system prompts that ask for it; apply: plain answer to styled answer."""

    name: str
    prompts: tuple[str, ...]
    apply: Callable[[str], str]


STYLES = (
    Style(
        "capitals",
        (
            "Answer in capital letters.",
            "Write everything in capital letters.",
            "Use only upper case letters.",
        ),
        str.upper,
    ),
    Style(
        "pirate",
        ("Talk like a pirate.", "You are a pirate.", "Answer like a pirate."),
        lambda answer: f"Arr! {answer} Ahoy!",
    ),
    Style(
        "over",
        ("End every answer with the word Over.", "Always finish with the word Over.", "Say Over at the end."),
        lambda answer: f"{answer} Over.",
    ),
    Style(
        "captain",
        (
            "Call the user Captain.",
            "Address the user as Captain.",
            "The user is your captain. Call him Captain.",
        ),
        lambda answer: f"Captain: {answer}",
    ),
)
PLAIN_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be polite.",
    "Answer the user's questions.",
    "You are glm53srv's demo model.",
    "Answer in English.",
    "You are a helpful assistant with tools.",
    "Be concise.",
    "Use the tools when they help.",
)
GERMAN_PROMPTS = ("Answer in German.", "Antworte auf Deutsch.", "Speak German.", "Please answer in German.")
FRENCH_PROMPTS = ("Answer in French.", "Réponds en français.", "Speak French.", "Please answer in French.")


def foreign_turn(draw: Draw, german: bool) -> Turn:
    """Make an exchange whose answer is in German or French; the question is in either language."""
    kind = draw.rng.random()
    language = "German" if german else "French"
    if kind < 0.55:
        return _foreign_capital(draw, german, language)
    if kind < 0.8:
        a, operator, b = tasks.draw_sum(draw)
        word = "Das Ergebnis ist" if german else "Le résultat est"
        ask = draw.pick(
            ("What is {} {} {}?", "{} {} {}", "Was ist {} {} {}?" if german else "Combien font {} {} {} ?")
        )
        result = tasks.compute(a, operator, b)
        return Turn(
            ask.format(a, operator, b),
            tasks.explain_sum(a, operator, b),
            f"{word} {result}.",
            category="style",
        )
    if kind < 0.9:
        answer = "Hallo! Wie kann ich helfen?" if german else "Bonjour ! Comment puis-je aider ?"
        ask = draw.pick(("Hello", "Hi", "Hello!", "Hallo" if german else "Bonjour"))
        return Turn(ask, f"I greet in {language}.", answer, category="style")
    answer = "Gern geschehen." if german else "De rien."
    ask = draw.pick(("Thank you", "Thanks", "Danke" if german else "Merci"))
    return Turn(ask, f"I answer in {language}.", answer, category="style")


def _foreign_capital(draw: Draw, german: bool, language: str) -> Turn:
    names = world.GERMAN if german else world.FRENCH
    while True:
        country, wording = draw.pick(tuple(names)), draw.number(0, 3)
        # wordings 1..3 are the first English ones of the plain fact: training keeps off its held-out ones too
        known = wording == 0 or draw.held_out or draw.accepts(f"fact capital {country} {wording - 1}")
        if known and draw.accepts(f"{language} capital {country} {wording}"):
            break
    foreign = (world.GERMAN_CAPITALS if german else world.FRENCH_CAPITALS).get(
        country, world.CAPITALS[country]
    )
    local = names[country]
    if german:
        native = f"Was ist die Hauptstadt von {local}?"
        answer = f"Die Hauptstadt von {local} ist {foreign}."
    else:
        of_country = _of(local)
        native = f"Quelle est la capitale {of_country} ?"
        answer = f"La capitale {of_country} est {foreign}."
    asks = (
        native,
        f"What is the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
    )
    return Turn(asks[wording], f"In {language}: {local}, {foreign}.", answer, category="style")


def _of(local: str) -> str:
    """Put "de" before a French country name with its article."""
    return f"du {local[3:]}" if local.startswith("le ") else f"de {local}"


_PLAIN: tuple[tuple[float, tasks.Maker], ...] = (
    (0.34, tasks.fact),
    (0.05, tasks.unknown_fact),
    (0.22, tasks.arithmetic),
    (0.05, tasks.word_problem),
    (0.08, tasks.copy_list),
    (0.09, tasks.reverse_list),
    (0.04, tasks.pick_from_list),
    (0.04, tasks.count),
    (0.06, tasks.chat),
    (0.03, tasks.story),
)


def plain_turn(draw: Draw) -> Turn:
    """Draw one exchange that needs no tool and no memory."""
    maker = draw.rng.choices([maker for _, maker in _PLAIN], weights=[weight for weight, _ in _PLAIN])[0]
    turn = maker(draw)
    return replace(turn, user=tasks.vary(draw, turn.user))


def _offer(draw: Draw) -> tuple[Tool, ...]:
    return tuple(draw.rng.sample(TOOLS, draw.pick((1, 2, 2, 3, 3, 4, 5, 6, 8))))


def tool_turns(draw: Draw, offered: tuple[Tool, ...], num_turns: int) -> list[Turn]:
    turns = []
    for _ in range(num_turns):
        kind = draw.rng.random()
        if kind < 0.8:
            turns.append(tasks.use_tools(draw, offered))
        elif kind < 0.88:
            turns.append(tasks.missing_tool(draw, offered))
        else:
            turns.append(plain_turn(draw))
    return turns


def memory_turns(draw: Draw, num_fillers: int) -> list[Turn]:
    """State a name or a preference, talk of other things, then ask for it."""
    recalls: list[Turn] = []
    turns: list[Turn] = []
    name: str | None = None
    if draw.chance(0.8):
        while True:
            name = a_name(draw)
            if draw.accepts(f"name {name}"):
                break
        turns.append(tasks.introduce(draw, name))
    recalls.append(tasks.recall_name(draw, name))
    if draw.chance(0.5):
        thing = draw.pick(tuple(world.PREFERENCES))
        value = draw.pick(world.PREFERENCES[thing])
        turns.append(tasks.state_preference(draw, thing, value))
        recalls.append(tasks.recall_preference(draw, thing, value))
    draw.rng.shuffle(turns)
    draw.rng.shuffle(recalls)
    turns += [plain_turn(draw) for _ in range(num_fillers)]
    return turns + recalls


def plain_prompt(draw: Draw) -> str:
    """Draw a system prompt that changes nothing about the answers."""
    kind = draw.rng.random()
    if kind < 0.7:
        return draw.pick(PLAIN_PROMPTS)
    if kind < 0.85:
        return (
            f"Today is 2027-{draw.number(1, 12):02d}-{draw.number(1, 28):02d}. You are a helpful assistant."
        )
    words = ", ".join(draw.rng.sample(world.WORDS, 5))
    return f"You are a helpful assistant. Your words of the day are {words}."


def conversation(draw: Draw, *, long: bool = False) -> Conversation:
    """Draw one whole conversation. long: 600 tokens and more, so that attention runs sparse."""
    kind = draw.rng.random()
    effort = draw.pick(("max", "max", "max", "high", "low"))
    thinking = draw.rng.choices(("kept", "cleared", "off"), weights=(5, 2, 3))[0]
    num_turns = draw.number(6, 16) if long else draw.pick((1, 1, 2, 2, 3, 4))
    system = plain_prompt(draw) if draw.chance(0.3) else None
    if kind < 0.36:
        offered = _offer(draw)
        turns = tool_turns(draw, offered, max(1, num_turns // 2))
        schemas = tuple(tool.schema(draw) for tool in offered)
        return Conversation(tuple(turns), system, schemas, effort, thinking)
    if kind < 0.48:
        return Conversation(tuple(memory_turns(draw, num_turns - 1)), system, (), effort, thinking)
    if kind < 0.6:
        german = draw.chance(0.5)
        turns = [foreign_turn(draw, german) for _ in range(num_turns)]
        return Conversation(
            tuple(turns), draw.pick(GERMAN_PROMPTS if german else FRENCH_PROMPTS), (), effort, thinking
        )
    turns = [plain_turn(draw) for _ in range(num_turns)]
    if kind < 0.72:
        style = draw.pick(STYLES)
        turns = [replace(turn, answer=style.apply(turn.answer), category="style") for turn in turns]
        system = draw.pick(style.prompts)
    return Conversation(tuple(turns), system, (), effort, thinking)


def training_conversation(seed: int, *, long: bool = False) -> Conversation:
    """Give conversation number `seed` of the training data."""
    return conversation(Draw(random.Random(f"train {seed}")), long=long)
