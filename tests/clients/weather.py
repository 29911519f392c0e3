"""One conversation that every client holds: ask, call two tools, read their results, answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.api.http_server import HttpServer

QUESTION = "Is it warmer in Oslo or in Rome?"
ANSWER = "Rome is warmer: 21 against 4 degrees. \U0001f642"
DEGREES = {"Oslo": 4, "Rome": 21}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Degrees in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
MAX_CONTEXT_TOKENS = 8192


def call(city: str, days: int) -> str:
    """Spell a call as the model does."""
    return (
        f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{city}</arg_value>"
        f"<arg_key>days</arg_key><arg_value>{days}</arg_value></tool_call>"
    )


def script_turns(http: HttpServer) -> None:
    """Script both turns; requests name them in x-request-id."""
    calls = call("Oslo", 1) + call("Rome", 2)
    http.server.script("turn-1", f"I need both.</think>Let me look.{calls}", end="<|observation|>")
    http.server.script("turn-2", f"Compare.</think>{ANSWER}", end="<|user|>")


def turn(number: int) -> dict[str, str]:
    """Give the header that names a turn."""
    return {"x-request-id": f"turn-{number}"}


def run_tool(name: str, arguments: str) -> str:
    """Be the tool. Fails on anything that the model did not ask for."""
    assert name == "get_weather"
    given: Mapping[str, Any] = json.loads(arguments)
    assert given["days"] == {"Oslo": 1, "Rome": 2}[given["city"]]
    return json.dumps({"degrees": DEGREES[given["city"]]})
