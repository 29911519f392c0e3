"""GLM's output to reasoning, content and tool calls, incrementally.

    REASONING </think> CONTENT <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> ...

    state        text                    marker                           next
    REASONING    reasoning               </think>                         CONTENT
                                         <tool_call>                      NAME
                                         others: text; <think> swallowed
    CONTENT      content                 <think>                          REASONING
                                         <tool_call>                      NAME
                                         others: text; </think> and a repeated </tool_call> swallowed
    NAME         collected               <arg_key>, </tool_call>          CALL, if it is a name
                                         <tool_call>                      SECOND, after a declared name
                                         others: given back
    SECOND       collected               </arg_key>                       CALL (it stood for <arg_key>)
                                         others: given back
    CALL         see call_parser         end of the call                  CONTENT

"Given back" means that <tool_call> was no call: it and its text go to where they stood, and reading goes on
there. The parser starts in the state in which the rendered prompt ends. A marker is a token (see markers), so
text that spells one passes. The result depends neither on how the text was cut nor on streaming. Look-ahead
is bounded: a marker, 256 characters of name, or the longest declared name; held white space is linear.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping

from glm53srv.api.call_parser import CallParser
from glm53srv.api.markers import CALL_MARKERS, Marker, Piece
from glm53srv.api.messages import CALLABLE_NAME
from glm53srv.api.output_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    merge_events,
)
from glm53srv.api.tool_types import ToolSchema

MAX_NAME_CHARS = 256
"""Text behind <tool_call> that is longer than this without a marker is no call."""


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    NAME = enum.auto()
    SECOND = enum.auto()
    CALL = enum.auto()


class OutputParser:
    """The output of one sequence. Owned by its stream, used on the event loop only.

    malformed: call syntax was broken somewhere (repaired, dropped, given back or cut).
    """

    def __init__(
        self, tools: Mapping[str, ToolSchema], *, starts_in_reasoning: bool, reads_calls: bool = True
    ) -> None:
        """Begin. reads_calls: False where no tool was offered: what looks like a call is text then."""
        self._tools = tools
        self._reads_calls = reads_calls
        self._state = _State.REASONING if starts_in_reasoning else _State.CONTENT
        self._origin = self._state  # where <tool_call> stood, while its name is read
        self._queue: deque[Piece] = deque()
        self._events: list[OutputEvent] = []
        self._content = _ContentTail(tools, self._events)
        self._name: list[str] = []
        self._second: list[str] = []
        self._call: CallParser | None = None
        self._call_is_void = False
        self._num_calls = 0
        self._saw_call = False
        self._just_closed = False
        self.malformed = False

    @property
    def in_reasoning(self) -> bool:
        """The next text is reasoning."""
        in_name = self._state in (_State.NAME, _State.SECOND)
        return (self._origin if in_name else self._state) is _State.REASONING

    @property
    def num_complete_calls(self) -> int:
        """Calls that got their CallEnd."""
        return self._num_calls - (1 if self.has_open_call else 0)

    @property
    def has_open_call(self) -> bool:
        """A CallStart has no CallEnd yet. After finish(): that call was cut."""
        return self._call is not None and not self._call_is_void

    def push(self, pieces: Iterable[Piece]) -> list[OutputEvent]:
        """Take decoded output, give what is certain by now."""
        if not self._reads_calls:
            pieces = (piece.value if piece in CALL_MARKERS else piece for piece in pieces)
        self._queue.extend(pieces)
        self._drain()
        return self._take_events()

    def finish(self, *, closes_calls: bool = False) -> list[OutputEvent]:
        """End the output.

        closes_calls: it ended with the stop token that the model writes only after calls, so that an open
        call is closed and counts. Otherwise a call without its end stays open.
        """
        while self._call is not None and self._call.settle(self._queue):
            self._drain()
        self._settle_name(closes_calls)
        self._drain()
        if self._call is not None:
            self.malformed = True
            if closes_calls:
                self._call.close_all()
                self._end_call()
        self._content.finish(drop_space=self._saw_call)
        return self._take_events()

    def _drain(self) -> None:
        queue = self._queue
        while queue:
            piece = queue.popleft()
            match self._state:
                case _State.REASONING:
                    self._in_reasoning(piece)
                case _State.CONTENT:
                    self._in_content(piece)
                case _State.NAME:
                    self._in_name(piece)
                case _State.SECOND:
                    self._in_second(piece)
                case _State.CALL:
                    self._in_call(piece)

    def _take_events(self) -> list[OutputEvent]:
        events = merge_events(self._events)
        self._events.clear()
        return events

    def _in_reasoning(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self._events.append(ReasoningDelta(piece))
        elif piece is Marker.THINK_END:
            self._state = _State.CONTENT
            self._content.begin()
        elif piece is Marker.TOOL_CALL:
            self._begin_name()
        elif piece is not Marker.THINK:
            self._events.append(ReasoningDelta(piece.value))

    def _in_content(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self._just_closed = self._just_closed and piece.isspace()
            self._content.add(piece)
            return
        just_closed, self._just_closed = self._just_closed, False
        if piece is Marker.TOOL_CALL:
            self._content.begin()
            self._begin_name()
        elif piece is Marker.THINK:
            self._content.begin()
            self._state = _State.REASONING
        elif piece is Marker.THINK_END:
            self._content.begin()
        elif piece is Marker.TOOL_CALL_END and just_closed:
            self.malformed = True
            self._just_closed = True
        else:
            self.malformed = True
            name = self._content.take_name() if piece is Marker.ARG_KEY else None
            if name is None:
                self._content.add(piece.value)
            else:  # a declared name before <arg_key>: only its <tool_call> is missing
                self._origin = _State.CONTENT
                self._begin_call(name)
                self._queue.appendleft(piece)

    def _begin_name(self) -> None:
        self._origin = self._state
        self._name.clear()
        self._state = _State.NAME

    def _in_name(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self._name.append(piece)
            if sum(map(len, self._name)) > MAX_NAME_CHARS:
                self._give_back()
            return
        name = "".join(self._name).strip()
        is_name = not name or CALLABLE_NAME.fullmatch(name) is not None
        if piece in (Marker.ARG_KEY, Marker.TOOL_CALL_END) and is_name:
            self._begin_call(name)
            self._queue.appendleft(piece)
        elif piece is Marker.ARG_VALUE_END and is_name:
            self.malformed = True
            self._begin_call(name)
        elif piece is Marker.ARG_KEY_END and (split := self._split_name(name)) is not None:
            self.malformed = True
            self._begin_call(split[0])
            self._queue.extendleft((piece, split[1], Marker.ARG_KEY))
        elif piece is Marker.TOOL_CALL and name in self._tools:
            self._second.clear()
            self._state = _State.SECOND
        elif piece is Marker.TOOL_CALL and not name:
            self.malformed = True
            self._name.clear()
        else:
            self._give_back(piece)

    def _in_second(self, piece: Piece) -> None:
        """Behind `<tool_call>name<tool_call>`: was the second one written for <arg_key>?"""
        if isinstance(piece, str):
            self._second.append(piece)
            if sum(map(len, self._second)) > MAX_NAME_CHARS:
                self._give_back(Marker.TOOL_CALL, *self._second)
            return
        key = "".join(self._second)
        if piece is Marker.ARG_KEY_END and key.strip():
            self.malformed = True
            self._begin_call("".join(self._name).strip())
            self._queue.extendleft((piece, key, Marker.ARG_KEY))
        else:
            self._give_back(Marker.TOOL_CALL, *self._second, piece)

    def _give_back(self, *after: Piece) -> None:
        """Read <tool_call> and its text as text where they stood, then what came after."""
        self.malformed = True
        self._state = self._origin
        self._queue.extendleft(reversed((Marker.TOOL_CALL.value, *self._name, *after)))

    def _split_name(self, text: str) -> tuple[str, str] | None:
        """Split `namekey` by the declared names: the longest tool name whose rest is one of its arguments."""
        for name in sorted(self._tools, key=len, reverse=True):
            key = text[len(name) :].strip()
            if text.startswith(name) and key in self._tools[name].types:
                return name, key
        return None

    def _begin_call(self, name: str) -> None:
        """Enter the call; one without a name is read to its end and dropped."""
        self._saw_call = True
        self._state = _State.CALL
        self._call_is_void = not name
        if not name:
            self.malformed = True
            self._call = CallParser(ToolSchema(""), lambda _: None)
            return
        index = self._num_calls
        self._num_calls += 1
        self._events.append(CallStart(index, name))
        schema = self._tools.get(name, ToolSchema(name))
        self._call = CallParser(schema, lambda text: self._events.append(CallArguments(index, text)))

    def _in_call(self, piece: Piece) -> None:
        assert self._call is not None, "state CALL without a call"
        self._call.feed(piece, self._queue)
        if self._call.is_closed:
            self._end_call()

    def _end_call(self) -> None:
        assert self._call is not None, "the end of no call"
        self.malformed = self.malformed or self._call.malformed
        if not self._call_is_void:
            self._events.append(CallEnd(self._num_calls - 1))
        self._call = None
        self._state = _State.CONTENT
        self._just_closed = True
        self._content.begin()

    def _settle_name(self, closes_calls: bool) -> None:
        """End behind <tool_call>: an impossible name was text, a possible one a call of unknown name."""
        if self._state not in (_State.NAME, _State.SECOND):
            return
        name = "".join(self._name).strip()
        is_name = CALLABLE_NAME.fullmatch(name) is not None
        if self._state is _State.NAME and name and not is_name:
            self._give_back()
            return
        self.malformed = True
        self._saw_call = True
        if is_name and closes_calls:
            self._begin_call(name)


class _ContentTail:
    """The end of the content that cannot go out yet: white space, and a word that may be a call's name.

    White space at the very end is dropped when there were calls. A declared tool name is held because
    <arg_key> may follow: then only the <tool_call> before it was lost, and the name must not be content.
    """

    def __init__(self, names: Iterable[str], events: list[OutputEvent]) -> None:
        self._names = tuple(names)
        self._events = events
        self._space: list[str] = []
        self._word = ""
        self._word_space: list[str] = []
        self._at_boundary = True

    def begin(self) -> None:
        """Pass a marker: no word reaches across it; the white space before it waits on."""
        self._release_word()
        self._at_boundary = True

    def add(self, text: str) -> None:
        """Take content."""
        if not text.strip():
            (self._word_space if self._word else self._space).append(text)
            if self._word and self._word not in self._names:
                self._release_word()
            return
        if self._word_space:
            self._release_word()
        text = self._word + text
        self._word = ""
        core = text.rstrip()
        word = core.split()[-1] if self._names else ""
        head = core[: len(core) - len(word)]
        after_space = head[-1].isspace() if head else bool(self._space) or self._at_boundary
        space = text[len(core) :]
        if word and after_space and self._may_be_name(word, is_whole=bool(space)):
            visible = head.rstrip()
            self._emit(visible)
            if head[len(visible) :]:
                self._space.append(head[len(visible) :])
            self._word = word
            self._word_space = [space] if space else []
        else:
            self._emit(core)
            if space:
                self._space.append(space)

    def take_name(self) -> str | None:
        """Give the held word if it is a declared name; it is content no more."""
        if self._word not in self._names:
            return None
        name, self._word = self._word, ""
        self._space += self._word_space
        self._word_space = []
        return name

    def finish(self, *, drop_space: bool) -> None:
        """Let everything go, or all but the white space at the end."""
        self._release_word()
        space = "".join(self._space)
        if space and not drop_space:
            self._events.append(ContentDelta(space))
        self._space.clear()

    def _release_word(self) -> None:
        word, space = self._word, self._word_space
        self._word, self._word_space = "", []
        self._emit(word)
        self._space += space

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta("".join((*self._space, text))))
            self._space.clear()
            self._at_boundary = False

    def _may_be_name(self, word: str, *, is_whole: bool) -> bool:
        if is_whole:
            return word in self._names
        return any(name.startswith(word) for name in self._names)
