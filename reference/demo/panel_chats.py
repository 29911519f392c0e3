"""The conversations behind the demo model's reference panel, as token sequences and as chat requests.

A panel entry holds a whole conversation. Its chat request asks for the last turn: what a server renders of it
must be the entry's beginning, so that a panel also shows whether a server's template is right. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from reference.demo.dialogue import conversation
from reference.demo.rendering import conversation_arguments
from reference.demo.sample import Conversation, Draw, JsonObject
from reference.demo.tokenizer import loss_mask_for, token_id

NAME = "conversation {}"


def panel_conversation(number: int) -> Conversation:
    """Draw a conversation on the held-out side, every third a long one; the same for the same number."""
    return conversation(Draw(random.Random(f"panel {number}"), held_out=True), long=number % 3 == 0)


def chat_request(drawn: Conversation) -> JsonObject:
    """Write the request that asks for a conversation's last turn, everything before it as its history."""
    arguments = conversation_arguments(drawn)
    messages = arguments["messages"]
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    body: JsonObject = {
        "messages": messages[: last_user + 1],
        "chat_template_kwargs": {
            "enable_thinking": drawn.thinking != "off",
            "clear_thinking": arguments["clear_thinking"],
        },
    }
    for name in ("tools", "reasoning_effort"):
        if name in arguments:
            body[name] = arguments[name]
    return body


def prompt_length(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Count the tokens of the prompt for a conversation's last turn: those before the first learned one.

    ids: the whole conversation, ended by a stop token, which may be the one that opens a user's turn.
    """
    user = token_id(tokenizer, "<|user|>")
    last_user = max(place for place, token in enumerate(ids[:-1]) if token == user)
    flags = loss_mask_for(tokenizer).mark(ids)
    return next(place for place, is_learned in enumerate(flags) if is_learned and place > last_user)


def add_chats(panel: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write into each entry of a panel file the chat request that it came from."""
    for number, entry in enumerate(panel["entries"]):
        if entry["name"] != NAME.format(number):
            raise ValueError(f"entry {number} is {entry['name']!r}, not one of these conversations")
        entry["chat"] = chat_request(panel_conversation(number))
        entry["num_prompt"] = prompt_length(entry["ids"], tokenizer)
