"""Ask a running server the held-out questions and score the answers (standard library only).

    python -m reference.demo.evaluate --base-url http://127.0.0.1:30000/v1 --per-category 50
    python -m reference.demo.evaluate --out reference/demo/evaluation.json    keeps the figures for the tests

Greedy (temperature 0). Prints one line per category, and exits with 1 when a figure is below its target. An
answer is right when it is the wanted text exactly. A tool case counts as right when names, order and typed
arguments of all calls are right and, given the results, the answer is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.demo.cases import CATEGORIES, Case, held_out_case
from reference.demo.rendering import conversation_arguments
from reference.demo.sample import Conversation, JsonObject

TARGETS = {"facts": 0.95, "arithmetic": 0.90, "tools": 0.95, "stops": 0.99}
"""Shares that the demo model must reach."""
MAX_TOKENS = 300
WEIGHTS = Path(__file__).parent / "checkpoint" / "model.safetensors"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case's outcome. stopped: every answer ended by itself."""

    category: str
    right: bool
    stopped: bool
    wanted: str
    got: str


def post(base_url: str, body: JsonObject) -> JsonObject:
    """Send one chat completion request; raises URLError when the server does not answer 200."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: JsonObject = json.loads(response.read())
    return answer


def question_of(conversation: Conversation) -> JsonObject:
    """Write the request that asks for a case's last turn."""
    arguments = conversation_arguments(conversation)
    last_user = max(i for i, message in enumerate(arguments["messages"]) if message["role"] == "user")
    body: JsonObject = {
        "messages": arguments["messages"][: last_user + 1],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    if "tools" in arguments:
        body["tools"] = arguments["tools"]
    return body


def calls_of(message: JsonObject) -> list[tuple[str, Any]]:
    """Give (name, arguments) of a message's calls; arguments that are no JSON stay text."""
    found = []
    for call in message.get("tool_calls") or []:
        text = call["function"]["arguments"]
        try:
            arguments: Any = json.loads(text)
        except ValueError:
            arguments = text
        found.append((str(call["function"]["name"]), arguments))
    return found


def judge(base_url: str, case: Case) -> Verdict:
    """Run one case against the server."""
    turn = case.turn
    body = question_of(case.conversation)
    choice = post(base_url, body)["choices"][0]
    stopped = choice["finish_reason"] in ("stop", "tool_calls")
    message = choice["message"]
    if turn.calls:
        wanted = [(call.name, call.arguments) for call in turn.calls]
        if calls_of(message) != wanted:
            got = json.dumps(message.get("tool_calls")) + str(message.get("content"))
            return Verdict(case.category, False, stopped, str(wanted), got)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(message["tool_calls"], turn.results, strict=True)
        ]
        choice = post(base_url, {**body, "messages": [*body["messages"], message, *results]})["choices"][0]
        stopped = stopped and choice["finish_reason"] == "stop"
        message = choice["message"]
    content = message.get("content") or ""
    return Verdict(case.category, content.strip() == turn.answer, stopped, turn.answer, content)


def evaluate(base_url: str, per_category: int, clients: int) -> list[Verdict]:
    """Judge the even-numbered held-out cases (those that think first, as the template asks)."""
    cases = [held_out_case(category, 2 * number) for category in CATEGORIES for number in range(per_category)]
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda case: judge(base_url, case), cases))


def shares(verdicts: list[Verdict]) -> dict[str, float]:
    """Give the share of right answers per category, and of answers that stopped."""
    table = {}
    for category in CATEGORIES:
        flags = [verdict.right for verdict in verdicts if verdict.category == category]
        if flags:
            table[category] = sum(flags) / len(flags)
    table["stops"] = sum(verdict.stopped for verdict in verdicts) / len(verdicts)
    return table


def record(table: dict[str, float], per_category: int) -> JsonObject:
    """Give what --out keeps: the shares, and which weights they are of."""
    return {
        "model_sha256": hashlib.sha256(WEIGHTS.read_bytes()).hexdigest(),
        "per_category": per_category,
        "shares": {name: round(share, 4) for name, share in table.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--per-category", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--show-wrong", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="also write the shares here; the server must serve checkpoint/"
    )
    options = parser.parse_args(argv)
    verdicts = evaluate(options.base_url, options.per_category, options.clients)
    table = shares(verdicts)
    if options.show_wrong:
        for verdict in verdicts:
            if not verdict.right:
                sys.stdout.write(f"{verdict.category}: wanted {verdict.wanted!r}, got {verdict.got!r}\n")
    for name, share in table.items():
        target = TARGETS.get(name)
        sys.stdout.write(f"{name:12} {share:6.1%}" + (f"   target {target:.0%}\n" if target else "\n"))
    if options.out is not None:
        text = json.dumps(record(table, options.per_category), indent=2) + "\n"
        options.out.write_text(text, encoding="utf-8")
    return 0 if all(table.get(name, 0.0) >= target for name, target in TARGETS.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
