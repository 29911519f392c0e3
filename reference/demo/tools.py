"""The tools the demo model learns to call: schema, how people ask for them, results and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from reference.demo import world
from reference.demo.sample import Call, Draw, JsonObject

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ROOMS = (
    "kitchen",
    "bedroom",
    "bathroom",
    "office",
    "hall",
    "garage",
    "garden",
    "living room",
    "attic",
    "cellar",
)
EVENTS = ("Lunch", "Dinner", "Team meeting", "Review", "Workshop", "Birthday party", "Football match", "Call")
CURRENCY_CODES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "PLN", "CAD", "AUD", "INR", "BRL")
ARTISTS = (
    "Queen",
    "Mozart",
    "Bach",
    "Adele",
    "Miles Davis",
    "Nina Simone",
    "The Beatles",
    "Chopin",
    "Bjork",
    "Abba",
)
EXTENSIONS = ("pdf", "txt", "md", "csv", "png", "docx", "py", "json")
LISTS = ("shopping", "packing", "todo", "party", "reading")
RESTAURANTS = ("Luna", "Roma", "The Old Mill", "Sakura", "Bella Vista", "Harbour House", "Green Garden")
SYMBOLS = ("ACME", "ORCL", "IBM", "SAP", "TSLA", "NOVA", "ZEN", "KITE", "MOON", "PEAR")
MESSAGES = (
    "see you at noon",
    "I am late",
    "call me back",
    "happy birthday",
    "the train is late",
    "dinner is ready",
    "good luck",
    "where are you",
    "the meeting is moved",
    "bring the keys",
    "thank you",
    "all is well",
)


_ABOUT = ("The {}", "{}", "Name of the {}", "The {} to use", "The {}, as text", "What {}")


@dataclass(frozen=True, slots=True)
class Request:
    """One thing asked of a tool: phrase fits "Please {phrase}."; answer follows the result."""

    phrase: str
    call: Call
    result: str
    answer: str
    key: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool's JSON schema in a few wordings, and a maker of requests."""

    name: str
    descriptions: tuple[str, ...]
    parameters: JsonObject
    request: Callable[[Draw], Request]

    def schema(self, draw: Draw) -> JsonObject:
        """Give the function object as it stands in a request; details that say nothing vary."""
        described = draw.chance(0.35)
        properties = {
            name: {**kind, "description": draw.pick(_ABOUT).format(name)} if described else kind
            for name, kind in self.parameters["properties"].items()
        }
        parameters = {**self.parameters, "properties": properties}
        if draw.chance(0.3):
            del parameters["required"]
        return {"name": self.name, "description": draw.pick(self.descriptions), "parameters": parameters}


def _object(properties: JsonObject, required: tuple[str, ...] = ()) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


_STRING: JsonObject = {"type": "string"}
_INTEGER: JsonObject = {"type": "integer"}
_NUMBER: JsonObject = {"type": "number"}
_BOOLEAN: JsonObject = {"type": "boolean"}
_STRINGS: JsonObject = {"type": "array", "items": {"type": "string"}}


def join(items: list[str] | tuple[str, ...]) -> str:
    """Write "a", "a and b" or "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def some(draw: Draw, options: tuple[str, ...], low: int, high: int) -> list[str]:
    """Draw distinct options, between low and high of them."""
    return draw.rng.sample(list(options), draw.number(low, high))


def a_city(draw: Draw) -> str:
    if draw.chance(0.25):
        return world.invent_word([draw.rng.random() for _ in range(draw.number(2, 4))]).capitalize()
    return draw.pick(world.CITIES)


def a_name(draw: Draw) -> str:
    if draw.chance(0.3):
        return world.invent_word([draw.rng.random() for _ in range(draw.number(2, 3))]).capitalize()
    return draw.pick(world.NAMES)


def _clock(draw: Draw) -> str:
    return f"{draw.number(0, 23):02d}:{draw.number(0, 11) * 5:02d}"


def _status(draw: Draw, done: str) -> tuple[str, str]:
    """Give a result of an action and the answer to it."""
    if draw.chance(0.12):
        problem = draw.pick(("not found", "no permission", "device offline", "time out"))
        return json.dumps({"error": problem}), f"That did not work: {problem}."
    return json.dumps({"status": "ok"}), done


def _weather(draw: Draw) -> Request:
    city = a_city(draw)
    arguments: JsonObject = {"city": city}
    phrase = draw.pick(
        (
            "tell me the weather in {}",
            "check the weather in {}",
            "get the weather for {}",
            "what is the weather in {}",
            "what is the weather like in {}",
        )
    ).format(city)
    if draw.chance(0.35):
        arguments["days"] = draw.number(2, 9)
        phrase += f" for {arguments['days']} days"
    if draw.chance(0.25):
        arguments["unit"] = draw.pick(("celsius", "fahrenheit"))
        phrase += f" in {arguments['unit']}"
    degrees, sky = draw.number(-9, 39), draw.pick(("sunny", "cloudy", "rainy", "windy", "snowy", "foggy"))
    result = json.dumps({"temperature": degrees, "condition": sky})
    answer = f"In {city} it is {degrees} degrees and {sky}."
    return Request(
        phrase, Call("get_weather", arguments), result, answer, f"weather {city} {arguments.get('days')}"
    )


def _time(draw: Draw) -> Request:
    city, clock = a_city(draw), _clock(draw)
    asks = (
        "tell me the time in {}",
        "check what time it is in {}",
        "get the time in {}",
        "what time is it in {}",
    )
    phrase = draw.pick(asks).format(city)
    return Request(
        phrase, Call("get_time", {"city": city}), clock, f"It is {clock} in {city}.", f"time {city}"
    )


def _convert(draw: Draw) -> Request:
    source, target = draw.rng.sample(CURRENCY_CODES, 2)
    amount: int | float = draw.number(1, 999)
    if draw.chance(0.4):
        amount = draw.number(1, 99) + draw.pick((0.25, 0.5, 0.75))
    total = round(amount * draw.pick((0.5, 0.75, 1.25, 2, 4)), 2)
    return Request(
        draw.pick(("convert {} {} to {}", "change {} {} into {}", "how much is {} {} in {}")).format(
            amount, source, target
        ),
        Call("convert_currency", {"amount": amount, "from": source, "to": target}),
        json.dumps({"result": total}),
        f"{amount} {source} are {total} {target}.",
        f"convert {amount} {source}",
    )


def _message(draw: Draw) -> Request:
    name = a_name(draw)
    text = draw.pick(MESSAGES) if draw.chance(0.5) else " ".join(some(draw, world.WORDS, 2, 5))
    arguments: JsonObject = {"recipient": name, "text": text}
    urgent = draw.chance(0.3)
    if urgent:
        arguments["urgent"] = True
    phrase = f'send {name} the {"urgent " if urgent else ""}message "{text}"'
    result, answer = _status(draw, f"I sent the message to {name}.")
    return Request(phrase, Call("send_message", arguments), result, answer, f"message {name} {text}")


def _event(draw: Draw) -> Request:
    title = draw.pick(EVENTS)
    date = f"2027-{draw.number(1, 12):02d}-{draw.number(1, 28):02d}"
    guests = [a_name(draw) for _ in range(draw.number(1, 3))]
    result, answer = _status(draw, f"I created the event {title} on {date}.")
    call = Call("create_event", {"title": title, "date": date, "attendees": guests})
    phrase = f'create an event "{title}" on {date} with {join(guests)}'
    return Request(phrase, call, result, answer, f"event {title} {date}")


def _light(draw: Draw) -> Request:
    room, turn_on = draw.pick(ROOMS), draw.chance(0.6)
    arguments: JsonObject = {"room": room, "on": turn_on}
    state = "on" if turn_on else "off"
    phrase = f"turn {state} the light in the {room}"
    if turn_on and draw.chance(0.5):
        arguments["brightness"] = draw.number(1, 100)
        phrase += f" at {arguments['brightness']} percent"
    result, answer = _status(draw, f"The light in the {room} is {state}.")
    return Request(
        phrase, Call("set_light", arguments), result, answer, f"light {room} {arguments.get('brightness')}"
    )


def _search(draw: Draw) -> Request:
    query, kinds, deep = draw.pick(world.WORDS), some(draw, EXTENSIONS, 1, 3), draw.chance(0.5)
    folders = "with" if deep else "without"
    count = draw.number(0, 60)
    return Request(
        f'search for "{query}" in {join(kinds)} files {folders} subfolders',
        Call("search_files", {"query": query, "extensions": kinds, "recursive": deep}),
        json.dumps({"matches": count}),
        f"I found {count} files with {query}.",
        f"search {query} {kinds[0]}",
    )


def _music(draw: Draw) -> Request:
    artist, shuffle = draw.pick(ARTISTS), draw.chance(0.5)
    arguments: JsonObject = {"artist": artist, "shuffle": shuffle}
    phrase = f"play music by {artist} {'shuffled' if shuffle else 'in order'}"
    if draw.chance(0.5):
        arguments["volume"] = draw.number(1, 100)
        phrase += f" at volume {arguments['volume']}"
    result, answer = _status(draw, f"Now playing {artist}.")
    return Request(
        phrase, Call("play_music", arguments), result, answer, f"music {artist} {arguments.get('volume')}"
    )


def _table(draw: Draw) -> Request:
    place = draw.pick(RESTAURANTS) if draw.chance(0.6) else a_city(draw)
    people, outdoor, quiet = draw.number(1, 12), draw.chance(0.5), draw.chance(0.5)
    phrase = f"book a table for {people} at {place}, {'outdoor' if outdoor else 'indoor'}"
    phrase += " and quiet" if quiet else " and not quiet"
    result, answer = _status(draw, f"I booked a table for {people} at {place}.")
    options = {"outdoor": outdoor, "quiet": quiet}
    call = Call("book_table", {"restaurant": place, "people": people, "options": options})
    return Request(phrase, call, result, answer, f"table {place} {people}")


def _alarm(draw: Draw) -> Request:
    clock, days = _clock(draw), some(draw, DAYS, 1, 3)
    result, answer = _status(draw, f"The alarm is set for {clock}.")
    call = Call("set_alarm", {"time": clock, "days": days})
    return Request(
        f"set an alarm at {clock} on {join(days)}", call, result, answer, f"alarm {clock} {days[0]}"
    )


def _list(draw: Draw) -> Request:
    name, items = draw.pick(LISTS), some(draw, world.WORDS, 1, 4)
    result, answer = _status(draw, f"I added {join(items)} to the {name} list.")
    call = Call("add_to_list", {"list": name, "items": items})
    return Request(f"add {join(items)} to the {name} list", call, result, answer, f"list {name} {items[0]}")


def _profile(draw: Draw) -> Request:
    user, city, age = a_name(draw), a_city(draw), draw.number(18, 90)
    result, answer = _status(draw, f"I updated the profile of {user}.")
    call = Call("update_profile", {"user": user, "fields": {"city": city, "age": age}})
    phrase = f"set the city of {user} to {city} and the age to {age}"
    return Request(phrase, call, result, answer, f"profile {city} {age}")


def _stock(draw: Draw) -> Request:
    symbol, price = draw.pick(SYMBOLS), draw.number(2, 900) + draw.pick((0, 0.25, 0.5, 0.75))
    asks = (
        "tell me the stock price of {}",
        "check the price of the {} stock",
        "what is the stock price of {}",
    )
    phrase = draw.pick(asks).format(symbol)
    call = Call("get_stock_price", {"symbol": symbol})
    result = json.dumps({"symbol": symbol, "price": price})
    return Request(phrase, call, result, f"The price of {symbol} is {price}.", f"stock {symbol} {phrase}")


def _dice(draw: Draw) -> Request:
    count, sides = draw.number(1, 6), draw.pick((4, 6, 8, 10, 12, 20))
    rolls = [draw.number(1, sides) for _ in range(count)]
    phrase = f"roll {count} dice with {sides} sides"
    call = Call("roll_dice", {"count": count, "sides": sides})
    return Request(
        phrase, call, json.dumps(rolls), f"I rolled {join([str(roll) for roll in rolls])}.", phrase
    )


def _reminders(draw: Draw) -> Request:
    things = some(draw, world.WORDS, 1, 3)
    phrase = draw.pick(("list my reminders", "show me my reminders", "what are my reminders"))
    answer = f"Your reminders are {join(things)}." if len(things) > 1 else f"Your reminder is {things[0]}."
    return Request(phrase, Call("list_reminders", {}), json.dumps(things), answer, f"reminders {things[0]}")


_UNIT: JsonObject = {"type": "string", "enum": ["celsius", "fahrenheit"]}
_OPTIONS = _object({"outdoor": _BOOLEAN, "quiet": _BOOLEAN})
_FIELDS = _object({"city": _STRING, "age": _INTEGER})

TOOLS = (
    Tool(
        "get_weather",
        (
            "Get the weather of a city",
            "Weather for a city",
            "Get weather",
            "Get the current weather in a given city",
        ),
        _object({"city": _STRING, "days": _INTEGER, "unit": _UNIT}, ("city",)),
        _weather,
    ),
    Tool(
        "get_time",
        (
            "Get the time in a city",
            "Local time of a city",
            "Get time",
            "Get the current time in a given city",
        ),
        _object({"city": _STRING}, ("city",)),
        _time,
    ),
    Tool(
        "convert_currency",
        ("Convert money", "Convert an amount between currencies"),
        _object({"amount": _NUMBER, "from": _STRING, "to": _STRING}, ("amount", "from", "to")),
        _convert,
    ),
    Tool(
        "send_message",
        ("Send a message", "Send a text message to a person"),
        _object({"recipient": _STRING, "text": _STRING, "urgent": _BOOLEAN}, ("recipient", "text")),
        _message,
    ),
    Tool(
        "create_event",
        ("Create a calendar event", "Add an event to the calendar"),
        _object({"title": _STRING, "date": _STRING, "attendees": _STRINGS}, ("title", "date")),
        _event,
    ),
    Tool(
        "set_light",
        ("Switch a light", "Turn a light on or off"),
        _object({"room": _STRING, "on": _BOOLEAN, "brightness": _INTEGER}, ("room", "on")),
        _light,
    ),
    Tool(
        "search_files",
        ("Search files", "Find files that hold a word"),
        _object({"query": _STRING, "extensions": _STRINGS, "recursive": _BOOLEAN}, ("query",)),
        _search,
    ),
    Tool(
        "play_music",
        ("Play music", "Play songs of an artist"),
        _object({"artist": _STRING, "shuffle": _BOOLEAN, "volume": _INTEGER}, ("artist",)),
        _music,
    ),
    Tool(
        "book_table",
        ("Book a table", "Reserve a table at a restaurant"),
        _object({"restaurant": _STRING, "people": _INTEGER, "options": _OPTIONS}, ("restaurant", "people")),
        _table,
    ),
    Tool(
        "set_alarm",
        ("Set an alarm", "Set an alarm on some days"),
        _object({"time": _STRING, "days": _STRINGS}, ("time",)),
        _alarm,
    ),
    Tool(
        "add_to_list",
        ("Add items to a list", "Put things on a list"),
        _object({"list": _STRING, "items": _STRINGS}, ("list", "items")),
        _list,
    ),
    Tool(
        "update_profile",
        ("Change a user's profile", "Update fields of a profile"),
        _object({"user": _STRING, "fields": _FIELDS}, ("user", "fields")),
        _profile,
    ),
    Tool(
        "get_stock_price",
        ("Get a stock price", "Price of a stock"),
        _object({"symbol": _STRING}, ("symbol",)),
        _stock,
    ),
    Tool(
        "roll_dice", ("Roll dice", "Throw some dice"), _object({"count": _INTEGER, "sides": _INTEGER}), _dice
    ),
    Tool("list_reminders", ("List all reminders", "Show the reminders"), _object({}), _reminders),
)


def request_for(draw: Draw, tool: Tool) -> Request:
    """Draw a request on the right side of the split."""
    while True:
        request = tool.request(draw)
        if draw.accepts(request.key):
            return request
