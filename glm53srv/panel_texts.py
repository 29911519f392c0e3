"""The token sequences that a panel is made of: read from a file, or the chats that stand here.

A texts file is a JSON list. Each entry has a name and either

    "ids": [...], "positions": [...]          tokens; positions to score, absent: all but the last
    "chat": {"messages": [...], ...}          a chat request: it is rendered with this server's template, and
                                              the reference continues it greedily; positions as above

so that a panel of any model can be made from chats alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53srv.api.chat_template import render_chat
from glm53srv.api.schema import parse_chat_request
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.errors import ConfigError, RequestError
from glm53srv.request import SamplingParams


@dataclass(frozen=True, slots=True)
class PanelText:
    """One token sequence and the positions at which the next token is scored, ascending.

    chat: the chat request whose rendered prompt ids[:num_prompt] is, or None.
    """

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    chat: Mapping[str, Any] | None = None
    num_prompt: int = 0


DEFAULT_CHATS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("greeting", {"messages": [{"role": "user", "content": "Good morning! Who are you?"}]}),
    (
        "explanation",
        {
            "messages": [
                {
                    "role": "user",
                    "content": "Explain why the sky is blue at noon and red in the evening, first for a "
                    "child of six, then for a student of physics. Say what would change on a planet with "
                    "twice as much air.",
                }
            ]
        },
    ),
    (
        "code",
        {
            "messages": [
                {"role": "system", "content": "You are a careful programmer. Answer with code first."},
                {
                    "role": "user",
                    "content": "Write a Python function `merge(a, b)` that merges two sorted lists in linear "
                    "time.\n\n```python\ndef merge(a: list[int], b: list[int]) -> list[int]:\n    ...\n```",
                },
            ]
        },
    ),
    (
        "several turns",
        {
            "messages": [
                {"role": "user", "content": "My dog is called Pebble and my cat is called Moss."},
                {"role": "assistant", "content": "Lovely names. What can I do for Pebble and Moss?"},
                {"role": "user", "content": "Which of the two is the cat? Then write a limerick about both."},
            ]
        },
    ),
    (
        "tool",
        {
            "messages": [{"role": "user", "content": "What is the weather in Oslo, and in Lima?"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "get_weather",
                        "description": "The weather of a city now.",
                        "parameters": {
                            "type": "object",
                            "properties": {"city": {"type": "string"}},
                            "required": ["city"],
                        },
                    },
                }
            ],
        },
    ),
    (
        "other scripts",
        {
            "messages": [
                {
                    "role": "user",
                    "content": "Übersetze: «Der Zug fährt um 7:45 Uhr ab.» 请用中文回答。 "
                    "Ответьте по-русски. 日本語でもお願いします。 E = mc² 🙂 — 3 × 17 = ?",
                }
            ]
        },
    ),
    (
        "no thinking",
        {
            "messages": [{"role": "user", "content": "Count from one to thirty in words."}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        "low effort",
        {
            "messages": [{"role": "user", "content": "List the twelve months with their number of days."}],
            "reasoning_effort": "low",
        },
    ),
)
"""Eight chats that reach every part of the template. Their answers are the reference's own."""


def default_texts(tokenizer: Tokenizer) -> list[PanelText]:
    """Render the chats that stand here."""
    return [_rendered(name, chat, tokenizer) for name, chat in DEFAULT_CHATS]


def read_texts(path: Path, tokenizer: Tokenizer) -> list[PanelText]:
    """Read a texts file. Raises ConfigError that names the file and the entry."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: must be a list of objects")
    try:
        return [
            _rendered(str(entry.get("name", number)), entry["chat"], tokenizer)
            if "chat" in entry
            else parse_texts([{"name": number, **entry}])[0]
            for number, entry in enumerate(entries)
        ]
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_texts(entries: Sequence[Mapping[str, Any]]) -> list[PanelText]:
    """Check entries of ids. Raises ConfigError that names the entry."""
    texts = []
    for number, entry in enumerate(entries):
        ids = tuple(int(token) for token in entry["ids"])
        positions = tuple(sorted(int(place) for place in entry.get("positions", range(len(ids) - 1))))
        if not positions or positions[0] < 0 or positions[-1] >= len(ids):
            raise ConfigError(f"text {number}: positions must lie in [0, {len(ids)})")
        texts.append(PanelText(str(entry.get("name", number)), ids, positions))
    return texts


def _rendered(name: str, chat: Mapping[str, Any], tokenizer: Tokenizer) -> PanelText:
    """Render a chat request as the server does. Raises ConfigError when the server would refuse it."""
    try:
        request = parse_chat_request(chat, SamplingParams())
        prompt = render_chat(request.messages, request.tools, request.template)
    except RequestError as error:
        raise ConfigError(f"{name}: {error}") from error
    ids = tokenizer.encode(prompt.segments)
    return PanelText(name, ids, tuple(range(len(ids))), chat, len(ids))
