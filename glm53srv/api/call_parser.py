"""The inside of one tool call, from behind its name to its end.

    state      text                          expected marker           everything else
    BETWEEN    ignored if white, else KEY    <arg_key> KEY             stray markers are dropped
    KEY        collected                     </arg_key> AFTER_KEY      <arg_value> ends the key too
    AFTER_KEY  ignored if white, else VALUE  <arg_value> VALUE         a key without a value is dropped
    VALUE      the value                     LOOKING                   other markers are part of the value
    LOOKING    what follows </arg_value>, </tool_call> or <arg_key> inside a value decides whether that marker
               has its meaning or is quoted text; see _Lookahead
    </tool_call> and <tool_call> end the call from every state but VALUE and LOOKING

Everything off the expected path sets `malformed`, but for markers quoted inside a value.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Callable, Collection

from glm53srv.api.markers import Marker, Piece
from glm53srv.api.tool_types import ToolSchema, argument_json, is_text_only


class _State(enum.Enum):
    BETWEEN = enum.auto()
    KEY = enum.auto()
    AFTER_KEY = enum.auto()
    VALUE = enum.auto()
    LOOKING = enum.auto()


class CallParser:
    """Reads the arguments of one call and writes them as JSON. Driven by OutputParser.

    Invariant: what was emitted so far is a prefix of a valid JSON object.
    """

    def __init__(self, schema: ToolSchema, emit: Callable[[str], None]) -> None:
        """emit: takes the next piece of JSON text."""
        self._schema = schema
        self._emit = emit
        self._state = _State.BETWEEN
        self._key: list[str] = []
        self._given: set[str] = set()
        self._look: _Lookahead | None = None
        self._value = _Value("", is_text=False)
        self._num_members = 0
        self.malformed = False
        self.is_closed = False

    def feed(self, piece: Piece, rest: deque[Piece]) -> None:
        """Take a piece. What must be read again is put back at the front of `rest`."""
        match self._state:
            case _State.BETWEEN:
                self._between(piece, rest)
            case _State.KEY:
                self._in_key(piece, rest)
            case _State.AFTER_KEY:
                self._after_key(piece, rest)
            case _State.VALUE:
                self._in_value(piece)
            case _State.LOOKING:
                self._looking(piece, rest)

    def settle(self, rest: deque[Piece]) -> bool:
        """At the end of the output, decide a pending look-ahead. Returns whether there was one."""
        if self._look is None:
            return False
        verdict = self._look.judge(self._unused(), at_end=True)
        self._act(self._look, bool(verdict), rest)
        return True

    def close_all(self) -> None:
        """Close whatever is open; for an output that ended with the token that only follows calls."""
        self.malformed = True
        if self._state is _State.VALUE:
            self._close_value()
        self._close_call()

    def _between(self, piece: Piece, rest: deque[Piece]) -> None:
        if isinstance(piece, str):
            if piece.strip():  # a key whose <arg_key> is missing
                self.malformed = True
                self._begin_key(piece)
        elif piece is Marker.ARG_KEY:
            self._begin_key()
        elif not self._ends_call(piece, rest):
            self.malformed = True

    def _in_key(self, piece: Piece, rest: deque[Piece]) -> None:
        if isinstance(piece, str):
            self._key.append(piece)
            return
        if piece is Marker.ARG_KEY_END:
            self._end_key()
            return
        self.malformed = True
        if piece is Marker.ARG_VALUE:
            self._end_key()
            self._open_value()
        elif piece is Marker.ARG_KEY:
            self._key.clear()
        else:
            self._ends_call(piece, rest)

    def _after_key(self, piece: Piece, rest: deque[Piece]) -> None:
        if isinstance(piece, str):
            text = piece.lstrip()
            if text:  # <arg_value> is missing
                self.malformed = True
                self._open_value()
                self._value_text(text)
            return
        if piece is Marker.ARG_VALUE:
            self._open_value()
            return
        self.malformed = True
        if piece is Marker.ARG_KEY:
            self._begin_key()
        else:
            self._ends_call(piece, rest)

    def _in_value(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self._value_text(piece)
        elif piece is Marker.ARG_VALUE and self._value.is_fresh:
            self.malformed = True  # doubled
        elif piece in (Marker.ARG_VALUE_END, Marker.TOOL_CALL_END, Marker.ARG_KEY):
            self._look = _Lookahead(piece)
            self._state = _State.LOOKING
        else:
            self._value_text(piece.value)

    def _looking(self, piece: Piece, rest: deque[Piece]) -> None:
        look = self._look
        assert look is not None, "LOOKING without a look-ahead"
        if not look.add(piece):
            return
        verdict = look.judge(self._unused(), at_end=False)
        if verdict is not None:
            self._act(look, verdict, rest)

    def _act(self, look: _Lookahead, closes: bool, rest: deque[Piece]) -> None:
        """Carry out a verdict: the first marker closes the value, or it is text; the rest is read again."""
        self._look = None
        self._state = _State.VALUE
        again = look.pieces()
        if not closes:
            self._value_text(look.first.value)
            rest.extendleft(reversed(again[1:]))
            return
        self._close_value()
        if look.first is Marker.ARG_VALUE_END:
            again = again[1:]
        else:
            self.malformed = True
        rest.extendleft(reversed(again))

    def _ends_call(self, marker: Marker, rest: deque[Piece]) -> bool:
        if marker is Marker.TOOL_CALL_END:
            self._close_call()
            return True
        if marker is Marker.TOOL_CALL:  # the next call begins without an end of this one
            self.malformed = True
            self._close_call()
            rest.appendleft(marker)
            return True
        return False

    def _begin_key(self, text: str = "") -> None:
        self._key = [text] if text else []
        self._state = _State.KEY

    def _end_key(self) -> None:
        key = "".join(self._key).strip()
        if not key or key in self._given:
            self.malformed = True
        self._key = [key]
        self._state = _State.AFTER_KEY

    def _open_value(self) -> None:
        key = self._key[0]
        self._given.add(key)
        self._value = _Value(key, is_text=is_text_only(self._schema.types_of(key)))
        self._state = _State.VALUE
        if self._value.is_streamed:
            self._emit(f'{self._separator()}{_quoted(key)}: "')

    def _value_text(self, text: str) -> None:
        self._value.is_fresh = False
        if self._value.is_streamed:
            self._emit(_quoted(text)[1:-1])
        else:
            self._value.parts.append(text)

    def _close_value(self) -> None:
        value = self._value
        self._state = _State.BETWEEN
        if value.is_streamed:
            self._emit('"')
        elif value.key:  # a value without a key is dropped
            literal = argument_json("".join(value.parts), self._schema.types_of(value.key))
            self._emit(f"{self._separator()}{_quoted(value.key)}: {literal}")

    def _close_call(self) -> None:
        self._emit("}" if self._num_members else "{}")
        self.is_closed = True

    def _separator(self) -> str:
        self._num_members += 1
        return "{" if self._num_members == 1 else ", "

    def _unused(self) -> Collection[str]:
        return [name for name in self._schema.types if name not in self._given]


class _Value:
    """The value being read. is_fresh: nothing came since its <arg_value>."""

    __slots__ = ("is_fresh", "is_streamed", "key", "parts")

    def __init__(self, key: str, *, is_text: bool) -> None:
        self.key = key
        self.is_streamed = is_text and key != ""
        self.is_fresh = True
        self.parts: list[str] = []


class _Lookahead:
    """A marker inside a value and what follows it, until its meaning is known.

    </arg_value>  closes before <arg_key>, </tool_call>, <tool_call>, before a declared unused name with
                  </arg_key>, and at the end of the output
    </tool_call>  closes value and call before <tool_call> and at the end of the output
    <arg_key>     closes if a declared unused name, </arg_key> and <arg_value> follow

    White space may stand in between. In every other case the marker is part of the value.
    """

    def __init__(self, first: Marker) -> None:
        self.first = first
        self._text: list[str] = []
        self._second: Marker | None = None
        self._gap: list[str] = []
        self._third: Marker | None = None

    def add(self, piece: Piece) -> bool:
        """Take the next piece. White space alone decides nothing: returns False then."""
        if isinstance(piece, str):
            (self._text if self._second is None else self._gap).append(piece)
            return not piece.isspace()
        if self._second is None:
            self._second = piece
        else:
            self._third = piece
        return True

    def pieces(self) -> list[Piece]:
        """Give everything taken, in order."""
        markers = (self._second, self._third)
        second, third = ([marker] if marker else [] for marker in markers)
        return [self.first, *self._text, *second, *self._gap, *third]

    def judge(self, unused: Collection[str], *, at_end: bool) -> bool | None:
        """Tell whether the first marker closes the value; None while that is open (never at the end)."""
        name = "".join(self._text).strip()
        if self.first is Marker.TOOL_CALL_END:
            return self._judge_call_end(name, at_end)
        if self.first is Marker.ARG_VALUE_END:
            return self._judge_value_end(name, unused, at_end)
        return self._judge_key(name, unused, at_end)

    def _judge_call_end(self, name: str, at_end: bool) -> bool | None:
        if name:
            return False
        if self._second is None:
            return True if at_end else None
        return self._second is Marker.TOOL_CALL

    def _judge_value_end(self, name: str, unused: Collection[str], at_end: bool) -> bool | None:
        if self._second is not None:
            if name:
                return self._second is Marker.ARG_KEY_END and name in unused
            return self._second in (Marker.ARG_KEY, Marker.TOOL_CALL_END, Marker.TOOL_CALL)
        if at_end:
            return not name
        return None if self._may_become_key(unused) else False

    def _judge_key(self, name: str, unused: Collection[str], at_end: bool) -> bool | None:
        if at_end:
            return False
        if self._second is None:
            return None if self._may_become_key(unused) else False
        if self._second is not Marker.ARG_KEY_END or name not in unused or "".join(self._gap).strip():
            return False
        return None if self._third is None else self._third is Marker.ARG_VALUE

    def _may_become_key(self, unused: Collection[str]) -> bool:
        text = "".join(self._text).lstrip()
        return not text or any(name.startswith(text) or name == text.rstrip() for name in unused)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
