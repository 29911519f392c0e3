"""Stop strings over token borders.

The stop strings form one automaton (Aho and Corasick, CACM 18(6), 1975). Its depth after a character is the
length of the longest suffix that can still become a stop string: exactly that much text is held back, never
more. The match that completes first wins; of several that complete at the same character the longest. So the
result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from glm53srv.api.markers import Piece, piece_text


class StopStrings:
    """Passes pieces on until a stop string is complete. One per sequence, event loop only.

    A marker takes part with its spelling and is passed on whole, or not at all when a match begins inside.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        """stops: none of them empty. include_match: the stop string itself is passed on too."""
        self._automaton = _Automaton(stops) if stops else None
        self._include_match = include_match
        self._node = 0
        self._held: deque[Piece] = deque()
        self._held_chars = 0
        self.matched: str | None = None

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Take pieces, give those that cannot belong to a stop string any more.

        After a match (see `matched`) everything further is swallowed.
        """
        if self._automaton is None:
            return list(pieces)
        released: list[Piece] = []
        for piece in pieces:
            if self.matched is not None:
                break
            released += self._push_one(piece, self._automaton)
        return released

    def flush(self) -> list[Piece]:
        """End of output: give what was held for a match that did not come."""
        rest = [] if self.matched is not None else list(self._held)
        self._held.clear()
        self._held_chars = 0
        self._node = 0
        return rest

    def _push_one(self, piece: Piece, automaton: _Automaton) -> list[Piece]:
        text = piece_text(piece)
        for position, char in enumerate(text):
            self._node = automaton.step(self._node, char)
            match = automaton.matches[self._node]
            if match is not None:
                return self._end_at_match(piece, position + 1, match)
        self._held.append(piece)
        self._held_chars += len(text)
        return self._release(self._held_chars - automaton.depths[self._node])

    def _end_at_match(self, piece: Piece, end: int, match: str) -> list[Piece]:
        """Close after `end` characters of piece."""
        cut = piece[:end] if isinstance(piece, str) else piece
        self._held.append(cut)
        self._held_chars += end if isinstance(piece, str) else len(piece_text(piece))
        self.matched = match
        if self._include_match:
            return self._release(self._held_chars)
        overhang = 0 if isinstance(piece, str) else len(piece_text(piece)) - end
        return self._release(self._held_chars - overhang - len(match))

    def _release(self, num_chars: int) -> list[Piece]:
        """Take the first num_chars held characters; a marker comes only when all of it is among them."""
        released: list[Piece] = []
        while self._held and num_chars > 0:
            piece = self._held[0]
            size = len(piece_text(piece))
            if size > num_chars:
                if not isinstance(piece, str):
                    break
                released.append(piece[:num_chars])
                self._held[0] = piece[num_chars:]
                self._held_chars -= num_chars
                break
            released.append(self._held.popleft())
            self._held_chars -= size
            num_chars -= size
        return released


class _Automaton:
    """goto and failure functions, the depth and the longest stop string of each node; node 0 is the root."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fails = [0]
        self.depths = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            node = 0
            for char in stop:
                child = self.children[node].get(char)
                if child is None:
                    child = len(self.children)
                    self.children[node][char] = child
                    self.children.append({})
                    self.fails.append(0)
                    self.depths.append(self.depths[node] + 1)
                    self.matches.append(None)
                node = child
            self.matches[node] = stop
        self._link()

    def step(self, node: int, char: str) -> int:
        while True:
            child = self.children[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fails[node]

    def _link(self) -> None:
        """Set the failure links breadth first; a node inherits the match of its failure node."""
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self.fails[child] = self.step(self.fails[node], char)
                if self.matches[child] is None:
                    self.matches[child] = self.matches[self.fails[child]]
                queue.append(child)
