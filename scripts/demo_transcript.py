#!/usr/bin/env python3
"""Ask a server of the demo model what README shows, and print the talk as Markdown. Standard library only.

    make serve
    python3 scripts/demo_transcript.py [http://127.0.0.1:30000]

Greedy, so that the same weights give the same text. Each answer is read from the stream; reasoning is set in
italics, a tool call as code. The last request is a whole tools loop: the results go back, the answer follows.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


def tool(name: str, description: str, required: list[str], **properties: str) -> Message:
    """Write a tool's schema. properties: JSON types by name."""
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    tool("get_weather", "Get the weather of a city", ["city"], city="string", days="integer", unit="string"),
    tool("get_time", "Get the local time of a city", ["city"], city="string"),
]
RESULTS = {"get_weather": '{"temperature": 21, "condition": "sunny"}', "get_time": "09:40"}
QUESTIONS = ("What is the capital of France?", "What is 47 + 38?", "Reverse: apple, river, stone")
TOOLS_QUESTION = "What is the weather in Oslo and what time is it in Lima?"


@dataclass
class Answer:
    """One streamed answer, put together again."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, Message] = field(default_factory=dict)

    def add(self, delta: Message) -> None:
        self.reasoning += delta.get("reasoning_content") or ""
        self.content += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(
                part["index"],
                {"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}},
            )
            for name in ("name", "arguments"):
                call["function"][name] += part["function"].get(name) or ""

    def as_markdown(self) -> str:
        lines = [f"> *{self.reasoning.strip()}*"] if self.reasoning else []
        lines += [
            f"> `{call['function']['name']}({call['function']['arguments']})`" for call in self.calls.values()
        ]
        lines += [f"> {self.content}"] if self.content else []
        return "  \n".join(lines)


def ask(base_url: str, body: Message) -> Answer:
    """Stream one chat request. Raises URLError when the server does not answer 200."""
    content = json.dumps({**body, "stream": True, "temperature": 0, "max_tokens": 300}).encode()
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", content, {"Content-Type": "application/json"}
    )
    answer = Answer()
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    answer.add(choice["delta"])
    return answer


def main(argv: list[str]) -> int:
    base_url = argv[0] if argv else "http://127.0.0.1:30000"
    for question in QUESTIONS:
        answer = ask(base_url, {"messages": [{"role": "user", "content": question}]})
        print(f"**{question}**\n\n{answer.as_markdown()}\n")
    messages: list[Message] = [{"role": "user", "content": TOOLS_QUESTION}]
    asked = ask(base_url, {"messages": messages, "tools": TOOLS})
    calls = list(asked.calls.values())
    print(f"**{TOOLS_QUESTION}** (offered: {', '.join(RESULTS)})\n\n{asked.as_markdown()}\n")
    messages.append({"role": "assistant", "content": asked.content, "tool_calls": calls})
    for call in calls:
        result = RESULTS.get(call["function"]["name"], '{"error": "no such tool"}')
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        print(f"Result: `{result}`\n")
    if calls:
        print(ask(base_url, {"messages": messages, "tools": TOOLS}).as_markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
