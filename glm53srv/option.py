"""What one option is; the tables of them are options.py and options_offload.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["str", "path", "int", "float", "choice"]


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `name` is the key in the file and the attribute in Settings; flags and env are its other
    names.

    minimum, maximum: bounds of a number, or None. unit and help go into --help and the documentation.
    is_secret: the value is never shown. refusals: values of a choice that users of other servers try, and
    why they are not there.
    """

    name: str
    flags: tuple[str, ...]
    env: str
    kind: Kind
    default: object
    help: str
    group: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_secret: bool = False
    refusals: Mapping[str, str] = field(default_factory=dict)
