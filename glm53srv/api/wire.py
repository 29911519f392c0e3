"""Typed reading of JSON objects: every wrong value is an InvalidRequest that names the field.

Paths are written as OpenAI writes them: `messages[0].content[1].text`. null means "not given" everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from glm53srv.errors import InvalidRequest

MAX_JSON_DEPTH = 100
"""Deepest nesting passed on to the template or a tool schema; deeper input is refused before it recurses."""


class UnsupportedContent(InvalidRequest):
    """A content part that a text-only server cannot serve."""

    code = "unsupported_content_type"


def invalid(path: str, text: str) -> InvalidRequest:
    """Build the error for one field: `path text`."""
    return InvalidRequest(f"{path} {text}", param=path)


def parse_body(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a request body. Raises InvalidRequest unless it is a JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"Request body is not valid JSON: {error.msg} at byte {error.pos}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("Request body must be a JSON object")
    return value


class Fields:
    """The members of one JSON object, read by name and type. path: "" for the body itself."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid(path, "must be an object")
        self._members: Mapping[str, Any] = value
        self.path = path

    def path_of(self, name: str) -> str:
        """Give the path of a member."""
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """Give a member unchecked; None when absent or null."""
        return self._members.get(name)

    def has(self, name: str) -> bool:
        """Tell whether a member is there and not null."""
        return self._members.get(name) is not None

    def error(self, name: str, text: str) -> InvalidRequest:
        """Build the error for a member."""
        return invalid(self.path_of(name), text)

    def string(self, name: str) -> str | None:
        """Read a string."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def integer(self, name: str) -> int | None:
        """Read a whole number; 3.0 is one, as JSON does not tell it from 3."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be a whole number")
        return value

    def number(self, name: str) -> float | None:
        """Read a finite number."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, "must be a number")
        return float(value)

    def list(self, name: str) -> Sequence[Any]:
        """Read a list; empty when absent."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(name, "must be a list")
        return value

    def object(self, name: str) -> Fields | None:
        """Read an object."""
        value = self.raw(name)
        return None if value is None else Fields(value, self.path_of(name))

    def names(self) -> Iterator[str]:
        """Give the names of all members, also those that are null."""
        return iter(self._members)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Give all members that are not null."""
        return ((name, value) for name, value in self._members.items() if value is not None)


def is_too_deep(value: object, limit: int = MAX_JSON_DEPTH) -> bool:
    """Tell whether nesting exceeds `limit` levels; walks without recursion."""
    level = [value]
    for _ in range(limit + 1):
        below: list[object] = []
        for entry in level:
            if isinstance(entry, dict):
                below.extend(entry.values())
            elif isinstance(entry, list):
                below.extend(entry)
        if not below:
            return False
        level = below
    return True
