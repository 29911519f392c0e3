"""Stop strings over the borders of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53srv.api.markers import Piece
from glm53srv.api.stop_strings import StopStrings
from tests.api.builders import join_pieces, split_markers


def run(stops: list[str], pieces: list[Piece], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include_match=include)
    out = [piece for given_piece in pieces for piece in matcher.push([given_piece])]
    out += matcher.flush()
    assert all(out)
    return join_pieces(out), matcher.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read character by character; the first end of a match wins, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def all_cuts(text: str) -> list[list[Piece]]:
    two_way: list[list[Piece]] = [[text[:at], text[at:]] for at in range(1, len(text))]
    return [[text], list(text), *two_way]


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["DEFGHIJ"], "ABCDEFGHIJKL", "ABC"),
        (["beta gamma"], "alpha beta gamma delta", "alpha "),
        (["DEFGHIJ"], "ABCDEFGHX", "ABCDEFGHX"),
        (["aab"], "aaaab", "aa"),
        (["b", "abc"], "xabc", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["\n\n"], "a\n\nb", "a"),
        (["🙂"], "é🙂", "é"),
        (["x"], "x", ""),
    ],
)
def test_stop_at_every_cut(stops: list[str], text: str, expected: str) -> None:
    for pieces in all_cuts(text):
        assert run(stops, pieces)[0] == expected


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab<", min_size=1, max_size=5), max_size=8),
)
def test_equals_reading_character_by_character(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, list(pieces)) == naive(stops, "".join(pieces))


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=8),
)
def test_holds_exactly_the_longest_possible_prefix(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    text = out = ""
    for piece in pieces:
        out += join_pieces(matcher.push([piece]))
        text += piece
        if matcher.matched is not None:
            return
        prefixes = [
            stop[:size] for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])
        ]
        assert text[len(out) :] == max(prefixes, key=len, default="")


def test_the_match_is_passed_on_when_asked() -> None:
    for pieces in all_cuts("abSTOPcd"):
        assert run(["STOP"], pieces, include=True) == ("abSTOP", "STOP")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(["x"])
    assert matcher.push(["ax", "b"]) == ["a"]
    assert matcher.push(["c"]) == []
    assert matcher.flush() == []


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopStrings([])
    assert matcher.push(split_markers("a</think>b")) == split_markers("a</think>b")


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("</think>", False, "ab"),
        ("</think>", True, "ab</think>"),
        ("b</th", False, "a"),
        ("</think>c", False, "ab"),
        ("nk>c", False, "ab"),
        ("nk>c", True, "ab</think>c"),
        ("zzz", False, "ab</think>cd"),
        ("<tool", False, "ab</think>cd"),
    ],
)
def test_a_marker_counts_with_its_spelling_and_is_never_cut(stop: str, include: bool, expected: str) -> None:
    matcher_out, _ = run([stop], split_markers("ab</think>cd"), include=include)
    assert matcher_out == expected
