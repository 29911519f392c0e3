"""Flags that belong to one command alone, taken off before the rest is read as configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glm53srv.errors import ConfigError


def take_flags(
    argv: Sequence[str], known: Mapping[str, str], switches: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Split argv into words that are none of the flags, and the values of those that are.

    known: flag -> what its value is, for the error text. switches: flags without a value; theirs is "".
    The last of several wins. Raises ConfigError when a value is missing.
    """
    words: list[str] = []
    values: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if word in switches:
            values[word] = ""
        elif flag not in known:
            words.append(word)
        elif equals:
            values[flag] = text
        elif rest:
            values[flag] = rest.pop(0)
        else:
            raise ConfigError(f"{flag} needs {known[flag]}")
    return words, values
