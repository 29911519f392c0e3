"""Typed look-ups in a JSON object, with errors that name the file and the full key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from glm53srv.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class JsonSection:
    """One object of a configuration file. file: its path. path: dotted key of this object, "" for the root.

    Every look-up raises CheckpointError when the key is absent (and no default was given) or has another
    type. A key whose value is null counts as absent.
    """

    file: str
    path: str
    values: Mapping[str, object]

    def error(self, key: str, reason: str) -> CheckpointError:
        """Give the error that says what is wrong with `key`."""
        full_key = f"{self.path}.{key}" if self.path else key
        return CheckpointError(f"{self.file}: {full_key} {reason}")

    def has(self, key: str) -> bool:
        """Tell whether `key` is there and not null."""
        return self.values.get(key) is not None

    def section(self, key: str) -> JsonSection:
        """Give the object under `key`."""
        value = self._value(key)
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return JsonSection(self.file, f"{self.path}.{key}" if self.path else key, value)

    def whole(self, key: str, *, default: int | None = None) -> int:
        """Give an integer of 0 or more."""
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise self.error(key, f"is {value!r}; must be a whole number")
        return value

    def count(self, key: str) -> int:
        """Give an integer of 1 or more."""
        value = self.whole(key)
        if value < 1:
            raise self.error(key, "is 0; must be 1 or more")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Give a finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"is {value!r}; must be a number")
        return float(value)

    def positive(self, key: str) -> float:
        """Give a finite number above 0."""
        value = self.number(key)
        if value <= 0:
            raise self.error(key, f"is {value!r}; must be above 0")
        return value

    def boolean(self, key: str) -> bool:
        """Give true or false."""
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}; must be true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """Give a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}; must be a string")
        return value

    def strings(self, key: str, *, length: int | None = None) -> tuple[str, ...]:
        """Give a list of strings, of exactly `length` entries if that is given."""
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        if length is not None and len(value) != length:
            raise self.error(key, f"has {len(value)} entries for {length} layers")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Give a list of integers; a single integer counts as a list of one."""
        value = self._value(key)
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in items):
            raise self.error(key, "must be a whole number or a list of them")
        return tuple(items)

    def require(self, key: str, expected: bool | int | str, reason: str) -> None:
        """Refuse any value but `expected`, with `reason`."""
        value = self._value(key)
        if type(value) is not type(expected) or value != expected:
            raise self.error(key, f"is {value!r}; {reason}")

    def _value(self, key: str, default: object = None) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
