"""`glm53srv config`: what is in force, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm53srv.config import HIDDEN, resolve
from glm53srv.options import OPTIONS, grouped
from glm53srv.sources import Settings, read_settings

SCHEMA = 1
"""Version of the JSON: a field may be added under the same number, none is taken away or changed."""


def show_config(
    argv: Sequence[str],
    environ: Mapping[str, str],
    num_cores: int,
    *,
    is_json: bool,
    default_model: Path | None = None,
) -> str:
    """Give the text of all settings. Raises ConfigError where `serve` would, except for a missing model.

    default_model: what `serve` takes when no model is named.
    """
    settings = read_settings(argv, environ)
    if default_model is not None:
        settings = settings.with_default_model(default_model)
    resolve(settings, num_cores, needs_model=False)  # refuses what does not go together
    return json.dumps(_as_json(settings), indent=2) if is_json else _as_toml(settings)


def _as_json(settings: Settings) -> dict[str, object]:
    options = {
        option.name: {
            "value": _shown(settings, option.name, option.is_secret),
            "source": settings.sources.get(option.name, "default"),
            "set_by": settings.names.get(option.name),
            "flags": list(option.flags),
            "variable": option.env,
        }
        for option in OPTIONS
    }
    return {"schema": SCHEMA, "options": options, "ignored": list(settings.ignored)}


def _as_toml(settings: Settings) -> str:
    """Give a file that --config takes; what is not set, and secrets, are comments in it."""
    lines = ["# what is in force; the comment says where it comes from"]
    for group, options in grouped().items():
        lines += ["", f"# {group}"]
        for option in options:
            value = _shown(settings, option.name, option.is_secret)
            source = settings.sources.get(option.name, "default")
            name = settings.names.get(option.name)
            whence = f"{source} {name}" if name is not None else source
            if value is None:
                lines.append(f"# {option.name} is not set: {option.help}")
            elif option.is_secret:
                lines.append(f"# {option.name} is set and not shown  # {whence}")
            else:
                lines.append(f"{option.name} = {_toml_value(value)}  # {whence}")
    lines += ["", *(f"# {line}" for line in settings.ignored)]
    return "\n".join(lines).rstrip()


def _shown(settings: Settings, name: str, is_secret: bool) -> Any:
    value = settings.values[name]
    if value is None:
        return None
    if is_secret:
        return HIDDEN
    return str(value) if isinstance(value, Path) else value


def _toml_value(value: object) -> str:
    # A JSON string is a TOML basic string, except that TOML wants DEL escaped and JSON leaves it.
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
