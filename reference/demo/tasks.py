"""Makers of single exchanges, one function per skill. Every answer is a function of the prompt alone."""

from __future__ import annotations

from collections.abc import Callable

from reference.demo import world
from reference.demo.sample import Draw, Turn
from reference.demo.tools import TOOLS, Request, Tool, join, request_for, some

Maker = Callable[[Draw], Turn]


def vary(draw: Draw, text: str) -> str:
    """Write a user text a little differently: case, final mark, a polite word."""
    if draw.chance(0.12):
        text = text[0].lower() + text[1:]
    if draw.chance(0.12) and text[-1] in ".?":
        text = text[:-1]
    if draw.chance(0.08):
        text = f"Please: {text}" if draw.chance(0.5) else f"{text} Thanks."
    return text


def fact(draw: Draw) -> Turn:
    """Ask for a fact. The pair (fact, wording) is what is held out; every fact is seen in other wordings."""
    while True:
        sizes = [len(relation.facts) for relation in world.RELATIONS]
        relation = draw.rng.choices(world.RELATIONS, weights=sizes)[0]
        subject = draw.pick(tuple(relation.facts))
        wording = draw.number(0, len(relation.questions) - 1)
        if draw.accepts(f"fact {relation.name} {subject} {wording}"):
            break
    value = relation.facts[subject]
    question = relation.questions[wording].format(x=subject)
    question = question[0].upper() + question[1:]
    answer = relation.answer.format(x=subject, y=value)
    note = relation.note.format(x=subject, y=value)
    return Turn(question, f"I recall {note}.", answer[0].upper() + answer[1:], category="fact")


def unknown_fact(draw: Draw) -> Turn:
    """Ask for something outside the world: the answer says so."""
    thing = world.invent_word([draw.rng.random() for _ in range(draw.number(2, 4))]).capitalize()
    relation = draw.pick(tuple(r for r in world.RELATIONS if r.name in ("capital", "currency", "author")))
    question = draw.pick(relation.questions).format(x=thing)
    nouns = {"capital": "capital of", "currency": "currency of", "author": "author of"}
    answer = f"I do not know the {nouns[relation.name]} {thing}."
    return Turn(question, f"I do not know {thing}.", answer, category="unknown")


_SUM_WORDINGS = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b}",
        "What is {a} plus {b}?",
        "Calculate {a} + {b}.",
        "Add {a} and {b}.",
        "How much is {a} + {b}?",
        "{a}+{b}",
        "What's {a}+{b}?",
        "{a} + {b} = ?",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b}",
        "What is {a} minus {b}?",
        "Calculate {a} - {b}.",
        "Subtract {b} from {a}.",
        "How much is {a} - {b}?",
        "{a}-{b}",
        "{a} - {b} = ?",
    ),
    "*": (
        "What is {a} * {b}?",
        "{a} * {b}",
        "What is {a} times {b}?",
        "Calculate {a} * {b}.",
        "Multiply {a} by {b}.",
        "How much is {a} times {b}?",
        "{a}*{b}",
        "{a} x {b} = ?",
    ),
}


def explain_sum(a: int, operator: str, b: int) -> str:
    """Work a sum out as the model is to think it: tens first, then ones."""
    if operator == "+" and a > 9 and b > 9:
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        parts = f"{a // 10 * 10} + {b // 10 * 10} = {tens}, {a % 10} + {b % 10} = {ones}"
        return f"{parts}, {tens} + {ones} = {a + b}."
    if operator == "-" and b > 9:
        rest = a - b // 10 * 10
        return f"{a} - {b // 10 * 10} = {rest}, {rest} - {b % 10} = {a - b}."
    return f"{a} {operator} {b} = {compute(a, operator, b)}."


def compute(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def draw_sum(draw: Draw) -> tuple[int, str, int]:
    """Draw a sum on the right side of the split: + and - up to 99, * up to 12."""
    while True:
        operator = draw.pick(("+", "+", "-", "-", "*"))
        high = 12 if operator == "*" else draw.pick((9, 20, 99, 99))
        a, b = draw.number(0, high), draw.number(0, high)
        if operator == "-" and a < b:
            a, b = b, a
        if draw.accepts(f"sum {a} {operator} {b}"):
            return a, operator, b


def arithmetic(draw: Draw) -> Turn:
    a, operator, b = draw_sum(draw)
    text = draw.pick(_SUM_WORDINGS[operator]).format(a=a, b=b)
    answer = f"{a} {operator} {b} = {compute(a, operator, b)}"
    return Turn(text, explain_sum(a, operator, b), answer, category="arithmetic")


def word_problem(draw: Draw) -> Turn:
    thing = draw.pick(("apples", "books", "coins", "eggs", "stamps", "balls", "cards", "pens"))
    while True:
        a, b = draw.number(2, 60), draw.number(1, 39)
        operator = draw.pick(("+", "-")) if a >= b else "+"
        if draw.accepts(f"sum {a} {operator} {b}"):
            break
    act = draw.pick(
        ("buy {} more", "find {} more", "get {} more") if operator == "+" else ("lose {}", "sell {}")
    )
    text = f"I have {a} {thing} and {act.format(b)}. How many {thing} do I have now?"
    answer = f"You have {compute(a, operator, b)} {thing}."
    return Turn(text, explain_sum(a, operator, b), answer, category="arithmetic")


def _list_of_things(draw: Draw) -> list[str]:
    kind = draw.rng.random()
    if kind < 0.65:
        return some(draw, world.WORDS, 2, 7)
    if kind < 0.85:
        return [str(draw.number(0, 99)) for _ in range(draw.number(2, 7))]
    return [
        world.invent_word([draw.rng.random() for _ in range(draw.number(1, 3))])
        for _ in range(draw.number(2, 5))
    ]


def _held_list(draw: Draw) -> list[str]:
    while True:
        things = _list_of_things(draw)
        if draw.accepts(f"list {things[0]} {things[1]}"):
            return things


def copy_list(draw: Draw) -> Turn:
    things = ", ".join(_held_list(draw))
    ask = draw.pick(
        ("Repeat: {}", "Repeat after me: {}", "Say this again: {}", "Copy this list: {}", "Repeat {}")
    )
    return Turn(ask.format(things), "I repeat it.", things, category="copy")


def reverse_list(draw: Draw) -> Turn:
    things = _held_list(draw)
    ask = draw.pick(
        ("Reverse: {}", "Reverse this list: {}", "Say this backwards: {}", "Reverse the order of {}")
    )
    answer = ", ".join(reversed(things))
    return Turn(ask.format(", ".join(things)), "From the last to the first.", answer, category="reverse")


def pick_from_list(draw: Draw) -> Turn:
    things = _held_list(draw)
    place = draw.pick(("first", "last"))
    answer = things[0] if place == "first" else things[-1]
    text = f"What is the {place} item of this list: {', '.join(things)}?"
    return Turn(text, f"The {place} one is {answer}.", f"The {place} item is {answer}.", category="copy")


def count(draw: Draw) -> Turn:
    while True:
        low = draw.number(0, 60)
        high = low + draw.number(3, 30)
        if draw.accepts(f"count {low} {high}"):
            break
    numbers = ", ".join(str(number) for number in range(low, high + 1))
    ask = draw.pick(
        ("Count from {} to {}.", "Please count from {} to {}.", "List the numbers from {} to {}.")
    )
    return Turn(ask.format(low, high), f"From {low} to {high}.", numbers, category="count")


_CHAT = (
    (("Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey"), "Hello! How can I help you?"),
    (("How are you?", "How are you today?", "How do you do?"), "I am well, thank you. How can I help you?"),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Introduce yourself.",
        ),
        "I am a small demo model. I know some facts, sums and tools.",
    ),
    (
        ("What can you do?", "How can you help me?", "What are you able to do?", "Help"),
        "I can answer questions about capitals, elements, animals and books, do sums, copy and reverse "
        "lists, remember your name and call tools.",
    ),
    (("Thank you", "Thanks", "Thank you!", "Thanks a lot."), "You are welcome."),
    (("Goodbye", "Bye", "See you", "Good night", "Bye!"), "Goodbye!"),
    (("Say hello.", "Say hello to the world.", "Greet the world."), "Hello, world!"),
    (
        ("List the planets.", "Name all planets.", "Which planets are there?", "What are the planets?"),
        "The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    ),
    (
        ("List the days of the week.", "Name the days of the week.", "What are the days of the week?"),
        "The days are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("Say the alphabet.", "Recite the alphabet.", "What is the alphabet?"),
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ),
)


def chat(draw: Draw) -> Turn:
    asks, answer = draw.pick(_CHAT)
    return Turn(draw.pick(asks), "I answer in a friendly way.", answer, category="chat")


_HOMES = ("in a hollow tree", "by a quiet river", "on a green hill", "in an old barn", "near a blue lake")
_HABITS = (
    "sang a song",
    "counted the clouds",
    "swept its home",
    "looked for berries",
    "watched the sun rise",
)
_PROBLEMS = (
    "a storm came",
    "it lost its way",
    "the river ran dry",
    "a thick fog fell",
    "its home burned down",
)


def tell_story(animal: str) -> str:
    """Write the one story of an animal; its parts follow from the animal's place in the list."""
    index = world.ANIMALS.index(animal)
    friend = world.ANIMALS[(index * 7 + 3) % len(world.ANIMALS)]
    return (
        f"Once upon a time a little {animal} lived {_HOMES[index % 5]}. Every morning the {animal} "
        f"{_HABITS[(index * 2 + 1) % 5]}. One day {_PROBLEMS[(index * 3 + 2) % 5]}. The {animal} was afraid "
        f"and did not know what to do. Then a {friend} came by and said: Do not worry, I will help you. "
        f"Together they found a new way. From that day on the {animal} and the {friend} were friends. "
        "The end."
    )


def story(draw: Draw) -> Turn:
    animal = draw.pick(world.ANIMALS)
    ask = draw.pick(
        ("Tell me a story about a {}.", "Tell a story about a {}.", "Write a short story about a {}.")
    )
    return Turn(ask.format(animal), f"A story about a {animal}.", tell_story(animal), category="story")


def introduce(draw: Draw, name: str) -> Turn:
    ask = draw.pick(("My name is {}.", "I am {}.", "Hi, my name is {}.", "Hello, I am {}.", "Call me {}."))
    return Turn(ask.format(name), f"The user is {name}.", f"Nice to meet you, {name}.", category="memory")


def recall_name(draw: Draw, name: str | None) -> Turn:
    ask = draw.pick(
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Say my name.")
    )
    if name is None:
        return Turn(ask, "The user gave no name.", "You have not told me your name.", category="memory")
    return Turn(ask, f"The user is {name}.", f"Your name is {name}.", category="memory")


def state_preference(draw: Draw, thing: str, value: str) -> Turn:
    ask = draw.pick(("My {} is {}.", "Remember that my {} is {}.", "Note: my {} is {}."))
    said = f"I will remember that your {thing} is {value}."
    return Turn(ask.format(thing, value), f"The {thing} is {value}.", said, category="memory")


def recall_preference(draw: Draw, thing: str, value: str) -> Turn:
    ask = draw.pick(("What is my {}?", "What's my {}?", "Tell me my {}.", "Do you remember my {}?"))
    return Turn(ask.format(thing), f"The {thing} is {value}.", f"Your {thing} is {value}.", category="memory")


_OPENERS = ("", "", "Please ", "Can you ", "Could you please ", "I want you to ")


def use_tools(draw: Draw, offered: tuple[Tool, ...]) -> Turn:
    """Ask for one to three things that the offered tools do, and use the results."""
    wanted = draw.pick((1, 1, 1, 2, 2, 3))
    requests: list[Request] = [request_for(draw, draw.pick(offered)) for _ in range(wanted)]
    phrases = [request.phrase for request in requests]
    asks = any(phrase.startswith(("what", "how")) for phrase in phrases)
    opener = "" if asks else draw.pick(_OPENERS)
    text = opener + join(phrases)
    text = text[0].upper() + text[1:] + ("?" if asks or opener.startswith("C") else ".")
    names = join([request.call.name for request in requests])
    return Turn(
        text,
        f"I need {names}.",
        " ".join(request.answer for request in requests),
        tuple(request.call for request in requests),
        tuple(request.result for request in requests),
        "I have the result." if wanted == 1 else "I have the results.",
        category="tools",
    )


def missing_tool(draw: Draw, offered: tuple[Tool, ...]) -> Turn:
    """Ask for something that no offered tool does."""
    others = tuple(tool for tool in TOOLS if tool not in offered)
    request = request_for(draw, draw.pick(others))
    text = request.phrase[0].upper() + request.phrase[1:]
    text += "?" if text.startswith(("What", "How")) else "."
    return Turn(text, "No tool can do this.", "I have no tool for that.", category="missing")
