"""Reasoning, content and calls, whole and at every cut."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53srv.api.detokenizer import Detokenizer
from glm53srv.api.markers import Marker, Piece
from glm53srv.api.output_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
)
from glm53srv.api.output_parser import OutputParser
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.api.tool_types import tool_schemas
from tests.api.builders import split_markers

OBSERVATION = 154829


@dataclass
class Parsed:
    """The assembled answer. calls: name, arguments text, complete."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)
    malformed: bool = False

    def take(self, event: OutputEvent) -> None:
        match event:
            case ReasoningDelta(text):
                assert text
                self.reasoning += text
            case ContentDelta(text):
                assert text
                self.content += text
            case CallStart(index, name):
                assert index == len(self.calls)
                self.calls.append((name, "", False))
            case CallArguments(index, text):
                assert index == len(self.calls) - 1
                name, before, complete = self.calls[-1]
                assert not complete
                self.calls[-1] = (name, before + text, False)
            case CallEnd(index):
                assert index == len(self.calls) - 1
                self.calls[-1] = (*self.calls[-1][:2], True)

    def complete_calls(self) -> list[dict[str, Any]]:
        return [{"name": n, "arguments": json.loads(args)} for n, args, complete in self.calls if complete]


def parse(
    deltas: list[list[Piece]],
    tools: list[dict[str, Any]],
    *,
    starts_in_reasoning: bool = True,
    closes_calls: bool = False,
) -> Parsed:
    parser = OutputParser(tool_schemas(tools), starts_in_reasoning=starts_in_reasoning)
    parsed = Parsed()
    for pieces in deltas:
        for event in parser.push(pieces):
            parsed.take(event)
    for event in parser.finish(closes_calls=closes_calls):
        parsed.take(event)
    parsed.malformed = parser.malformed
    assert parser.num_complete_calls == len(parsed.complete_calls())
    assert parser.has_open_call == any(not complete for _, _, complete in parsed.calls)
    return parsed


def chars(pieces: list[Piece]) -> list[list[Piece]]:
    """One character, or one marker, per delta."""
    return [[c] for piece in pieces for c in (piece if isinstance(piece, str) else [piece])]


def cut_at(pieces: list[Piece], position: int) -> list[list[Piece]]:
    """Cut after `position` characters; a marker counts as one and stays whole."""
    left: list[Piece] = []
    for at, piece in enumerate(pieces):
        size = len(piece) if isinstance(piece, str) else 1
        if position < size:
            if position == 0 or not isinstance(piece, str):
                return [left, pieces[at:]]
            return [[*left, piece[:position]], [piece[position:], *pieces[at + 1 :]]]
        left.append(piece)
        position -= size
    return [left]


def cuts(pieces: list[Piece]) -> list[list[list[Piece]]]:
    """Whole, one by one, and every two-way cut."""
    single = chars(pieces)
    return [[pieces], single, *(cut_at(pieces, at) for at in range(1, len(single)))]


def load_cases(shared_dir: Path) -> dict[str, Any]:
    text = (shared_dir / "fixtures" / "glm" / "tool_call_cases.json").read_text(encoding="utf-8")
    cases: dict[str, Any] = json.loads(text)
    return cases


def check_expected(parsed: Parsed, expect: dict[str, Any], name: str) -> None:
    assert (parsed.reasoning or None) == expect["reasoning"], name
    assert (parsed.content or None) == expect["content"], name
    assert parsed.complete_calls() == expect["tool_calls"], name
    assert parsed.malformed == expect["malformed"], name


def test_fixture_text_cases_whole_and_at_every_cut(shared_dir: Path) -> None:
    cases = load_cases(shared_dir)["cases"]
    assert len(cases) == 159
    for case in cases:
        outcomes = [
            parse(deltas, case["tools"], starts_in_reasoning=case["prompt_ends_in_reasoning"])
            for deltas in cuts(split_markers(case["raw"]))
        ]
        check_expected(outcomes[0], case["expect"], case["name"])
        assert all(outcome == outcomes[0] for outcome in outcomes), case["name"]
        if "partial" in case["expect"]:
            assert outcomes[0].calls[-1][0] == case["expect"]["partial"]["name"], case["name"]


def test_fixture_id_cases_token_by_token(shared_dir: Path, glm_tokenizer: Tokenizer) -> None:
    cases = load_cases(shared_dir)["id_cases"]
    assert len(cases) == 15
    for case in cases:
        detokenizer = Detokenizer(glm_tokenizer)
        deltas = [detokenizer.push(token_id) for token_id in case["ids"]]
        deltas.append(detokenizer.flush())
        parsed = parse(
            deltas,
            case["tools"],
            starts_in_reasoning=case["prompt_ends_in_reasoning"],
            closes_calls=case["stop_id"] == OBSERVATION,
        )
        check_expected(parsed, case["expect"], case["name"])


WEATHER = {
    "name": "get_weather",
    "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "x": {}}},
}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, TIME]


def parse_text(raw: str, tools: list[dict[str, Any]] = TOOLS, *, closes_calls: bool = False) -> Parsed:
    """Parse at every cut; all must agree."""
    outcomes = [parse(deltas, tools, closes_calls=closes_calls) for deltas in cuts(split_markers(raw))]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def test_string_arguments_stream_as_they_come() -> None:
    parser = OutputParser(tool_schemas(TOOLS), starts_in_reasoning=False)
    assert parser.push([Marker.TOOL_CALL, "get_weather"]) == []
    assert parser.push([Marker.ARG_KEY]) == [CallStart(0, "get_weather")]
    parser.push(["city", Marker.ARG_KEY_END])
    assert parser.push([Marker.ARG_VALUE]) == [CallArguments(0, '{"city": "')]
    assert parser.push(['a "b"\n']) == [CallArguments(0, 'a \\"b\\"\\n')]
    assert parser.push(["ö"]) == [CallArguments(0, "ö")]


def test_plain_content_is_not_held() -> None:
    parser = OutputParser(tool_schemas(TOOLS), starts_in_reasoning=False)
    assert parser.push(["Hello"]) == [ContentDelta("Hello")]
    assert parser.push([" wor"]) == [ContentDelta(" wor")]
    assert parser.push(["ld get_"]) == [ContentDelta("ld")]
    assert parser.push(["it"]) == [ContentDelta(" get_it")]


def test_a_lost_opening_marker_before_a_declared_name_is_repaired() -> None:
    raw = "Go.</think>get_weather<arg_key>city</arg_key><arg_value>Lima</arg_value></tool_call>"
    parsed = parse_text(raw)
    assert (parsed.content, parsed.malformed) == ("", True)
    assert parsed.complete_calls() == [{"name": "get_weather", "arguments": {"city": "Lima"}}]


def test_a_lost_opening_marker_after_text_is_repaired_too() -> None:
    parsed = parse_text(
        "r</think>I look.\nget_weather\n<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    )
    assert parsed.content == "I look."
    assert parsed.complete_calls() == [{"name": "get_weather", "arguments": {"days": 2}}]


@pytest.mark.parametrize(
    "text", ["get_weather", "get_weather ", "use get_weather now", "xget_weather", "get_weatherx"]
)
def test_a_tool_name_in_prose_stays_content(text: str) -> None:
    assert parse_text("r</think>" + text).content == text


def test_the_stop_token_of_calls_closes_an_open_call() -> None:
    raw = "r</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo"
    assert parse_text(raw).complete_calls() == []
    closed = parse_text(raw, closes_calls=True)
    assert closed.complete_calls() == [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    assert closed.malformed
    assert (
        parse_text("r</think><tool_call>get_time", closes_calls=True).complete_calls()[0]["arguments"] == {}
    )


def test_a_doubled_opening_marker_is_dropped() -> None:
    parsed = parse_text("r</think><tool_call> <tool_call>get_time</tool_call>")
    assert (parsed.content, len(parsed.calls), parsed.malformed) == ("", 1, True)


def test_reasoning_state_is_known_while_a_name_is_read() -> None:
    parser = OutputParser({}, starts_in_reasoning=True)
    parser.push(["a", Marker.TOOL_CALL, "f"])
    assert parser.in_reasoning
    parser.push([Marker.TOOL_CALL_END])
    assert not parser.in_reasoning


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    parser = OutputParser({}, starts_in_reasoning=True, reads_calls=False)
    pieces: list[Piece] = ["hm", Marker.THINK_END, "So: ", Marker.TOOL_CALL, "get_time", Marker.TOOL_CALL_END]
    events = parser.push(pieces) + parser.finish()
    assert events == [ReasoningDelta("hm"), ContentDelta("So: <tool_call>get_time</tool_call>")]
    assert not parser.malformed
    assert parser.num_complete_calls == 0


TEXTS = st.sampled_from(
    [
        " ",
        "\n",
        "a",
        "get_weather",
        "get_",
        "weather",
        "city",
        "days",
        "x",
        "7",
        '"',
        "{",
        "get_time",
        " city",
        "bash",
    ]
)
PIECES = st.lists(st.one_of(TEXTS, st.sampled_from(list(Marker))), max_size=24)


def regroup(pieces: list[Piece], rng: random.Random) -> list[list[Piece]]:
    deltas: list[list[Piece]] = [[]]
    for delta in chars(pieces):
        if rng.random() < 0.4:
            deltas.append([])
        deltas[-1] += delta
    return deltas


@settings(max_examples=400, deadline=None)
@given(PIECES, st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_any_output_parses_alike_however_it_is_cut(
    pieces: list[Piece], starts_in_reasoning: bool, closes_calls: bool, seed: int
) -> None:
    rng = random.Random(seed)
    runs = [[pieces], chars(pieces), regroup(pieces, rng), regroup(pieces, rng)]
    outcomes = [
        parse(run, TOOLS, starts_in_reasoning=starts_in_reasoning, closes_calls=closes_calls) for run in runs
    ]
    assert all(outcome == outcomes[0] for outcome in outcomes)


@settings(max_examples=300, deadline=None)
@given(PIECES, st.booleans())
def test_arguments_are_always_a_prefix_of_valid_json(pieces: list[Piece], starts_in_reasoning: bool) -> None:
    parsed = parse(chars(pieces), TOOLS, starts_in_reasoning=starts_in_reasoning)
    for _, arguments, complete in parsed.calls:
        if complete:
            assert isinstance(json.loads(arguments), dict)
        elif arguments:
            open_string = arguments.count('"') - arguments.count('\\"')
            closed = arguments + ('"' if open_string % 2 else "")
            assert isinstance(json.loads(closed + "}"), dict)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(TEXTS, st.just(Marker.THINK), st.just(Marker.THINK_END)), max_size=20))
def test_think_markers_never_leak_and_no_text_is_lost(pieces: list[Piece]) -> None:
    parsed = parse([pieces], TOOLS)
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    assert sorted(parsed.reasoning + parsed.content) == sorted(text)


def test_long_white_space_costs_linear_time_in_every_state() -> None:
    """150,000 one-character deltas of white space each; a quadratic hold would not end within the timeout."""
    spaces: list[list[Piece]] = [["\n"]] * 150_000
    openings: list[list[Piece]] = [
        ["a"],
        ["get_weather"],
        split_markers("<tool_call>get_time"),
        split_markers("<tool_call>get_weather<arg_key>city</arg_key>"),
        split_markers("<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value>"),
        split_markers("<tool_call>get_weather<arg_key>city</arg_key><arg_value>a<arg_key>days</arg_key>"),
    ]
    for opening in openings:
        parse([opening, *spaces, ["x"]], TOOLS, starts_in_reasoning=False)
