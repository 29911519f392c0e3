"""`python -m bench.grammar --tokenizer DIR`: what constrained output costs, with a checkpoint's vocabulary.

For each grammar: the time to compile it (text thread), to copy it for a sequence (engine thread, once), and
per token to compute the mask, to apply it to a row of logits, and to take the token in. The text is one that
the grammar accepts, so every state on its way is seen; masks of states seen before come from llguidance's
cache, so the first pass and the later ones are told apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.sse import machine
from glm53srv.api.constraints import schema_constraint
from glm53srv.api.loading import grammar_compiler
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.api.tool_grammar import ToolChoice, tool_format
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.request import Constraint

T = TypeVar("T")
END_NAMES = ("<|endoftext|>", "<|user|>", "<|observation|>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_TEXT = json.dumps(
    {"name": 'Jürgen "J." Weiß', "age": 41, "tags": ["a", "harbour keeper"]}, ensure_ascii=False
)
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
WEATHER_TEXT = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rio de Janeiro</arg_value>"
    "<arg_key>days</arg_key><arg_value>12</arg_value></tool_call>"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A constraint and a word of it, as ids."""

    name: str
    constraint: Constraint
    ids: Sequence[int]


def cases(tokenizer: Tokenizer) -> list[Case]:
    """Give the constraints to measure."""
    calls = tool_format([WEATHER], ToolChoice(required=True), None, tokenizer)
    assert calls is not None, "a forced call without a grammar"
    text = tokenizer.encode_text
    return [
        Case("JSON schema", schema_constraint(PERSON), text(PERSON_TEXT)),
        Case("any object", schema_constraint({"type": "object"}), text(PERSON_TEXT)),
        Case("regex", Constraint("regex", "[0-9]{3}-[0-9]{4}"), text("555-1234")),
        Case("forced call", calls.constraint, tokenizer.encode_with_controls(WEATHER_TEXT)),
    ]


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Give a result and its time in microseconds."""
    begin_s = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - begin_s) * 1e6


def walk(grammars: GrammarCompiler, case: Case, num_rows: int) -> dict[str, list[float]]:
    """Go through a word once; gives microseconds of every token by part."""
    matcher, copy_us = timed(lambda: grammars.matcher(case.constraint))
    row = np.zeros(num_rows, dtype=np.float32)
    times: dict[str, list[float]] = {"copy": [copy_us], "mask": [], "apply": [], "accept": []}
    for token_id in case.ids:
        allowed, mask_us = timed(matcher.allowed)
        if not allowed[token_id]:
            raise RuntimeError(f"{case.name}: id {token_id} is not allowed, so the bench is wrong")
        begin_s = time.perf_counter()
        np.copyto(row, -np.inf, where=~allowed)
        middle_s = time.perf_counter()
        matcher.accept(token_id)
        end_s = time.perf_counter()
        times["mask"].append(mask_us)
        times["apply"].append((middle_s - begin_s) * 1e6)
        times["accept"].append((end_s - middle_s) * 1e6)
    return times


def report(grammars: GrammarCompiler, case: Case, num_rows: int, repeats: int) -> str:
    """Measure one case; gives its line."""
    _, compile_us = timed(lambda: grammars.check(case.constraint))
    first = walk(grammars, case, num_rows)
    later = [walk(grammars, case, num_rows) for _ in range(repeats)]
    parts = {name: statistics.median(value for run in later for value in run[name]) for name in first}
    step_us = parts["mask"] + parts["apply"] + parts["accept"]
    first_us, worst_us = statistics.median(first["mask"]), max(first["mask"])
    return (
        f"{case.name:>12}: compile {compile_us / 1e3:5.2f} ms, copy {parts['copy']:4.1f} us; "
        f"per token mask {parts['mask']:5.1f} (first pass {first_us:5.1f}, most {worst_us:6.0f}), "
        f"apply {parts['apply']:5.1f}, accept {parts['accept']:4.1f}, together {step_us:5.1f} us"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.grammar", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args(argv)
    tokenizer = Tokenizer.load(arguments.tokenizer)
    end_ids = [token_id for name in END_NAMES if (token_id := tokenizer.control_id(name)) is not None]
    grammars, build_us = timed(lambda: grammar_compiler(tokenizer, end_ids))
    print(f"{machine()}, Python {platform.python_version()}, medians of {arguments.repeats} passes")
    print(f"vocabulary of {tokenizer.num_ids} ids indexed in {build_us / 1e6:.2f} s")
    for case in cases(tokenizer):
        print(report(grammars, case, tokenizer.num_ids, arguments.repeats))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
