"""Where settings come from: the file, the environment and the command line, merged into one set of values.

    default  <  file  <  environment  <  command line        and inside one level the last one wins

The file is --config, else GLM53_CONFIG, else ./glm53srv.toml if it is there; its keys are option names (`port
= 8080`). Every unknown flag, key or GLM53_* variable is an error that names the closest known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm53srv.errors import ConfigError
from glm53srv.option import Option
from glm53srv.options import OPTIONS, closest_hint, parse_value
from glm53srv.original_interface import (
    CPU_TIER_ENV,
    CPU_TIER_MODES,
    REFUSED_PREFIXES,
    WITHOUT_EFFECT,
)

ENV_PREFIX = "GLM53_"
DEFAULT_CONFIG_FILE = "glm53srv.toml"
CONFIG_FILE_ENV = "GLM53_CONFIG"
CONFIG_FLAG = "--config"

START_SCRIPT_ENV = frozenset({"GLM53_ROOT", "GLM53_ARGS"})
"""Read by docker/entrypoint.sh and scripts/install.sh, and often set for a whole container or service: known
names here, so that any other command runs there too."""

Source = Literal["default", "file", "environment", "command line"]

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
_BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
_BY_ENV = {option.env: option for option in OPTIONS}
_FLAGS = {**_BY_FLAG, CONFIG_FLAG: None}
_VARIABLES = {**_BY_ENV, CONFIG_FILE_ENV: None}


@dataclass(frozen=True, slots=True)
class Settings:
    """Raw option values after the sources are merged, before resolve().

    sources: where a value that is not the default came from; names: the flag, variable or file that set it.
    ignored: lines about names that were accepted without effect.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, Source]
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(slots=True)
class _Layer:
    """What one source says: values by option name, and the names that set them."""

    source: Source
    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def set(self, option: Option, text: str, name: str, where: str) -> None:
        self.values[option.name] = parse_value(option, text, where)
        self.names[option.name] = name

    def ignore(self, name: str, text: str) -> None:
        self.ignored.append(f"{name} = {text} ({self.source}) is without effect: {WITHOUT_EFFECT[name]}")


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Merge defaults, file, environment and command line. Raises ConfigError."""
    arguments, named_file = _read_arguments(argv)
    values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    sources: dict[str, Source] = {}
    names: dict[str, str] = {}
    layers = (_read_file(named_file, environ), _read_environment(environ), arguments)
    for layer in layers:
        values.update(layer.values)
        names.update(layer.names)
        sources.update(dict.fromkeys(layer.values, layer.source))
    return Settings(values, sources, names, tuple(line for layer in layers for line in layer.ignored))


def _read_file(named: str | None, environ: Mapping[str, str]) -> _Layer:
    layer = _Layer("file")
    named = named or environ.get(CONFIG_FILE_ENV) or None
    path = Path(named or DEFAULT_CONFIG_FILE).expanduser()
    if named is None and not path.is_file():
        return layer
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; name a TOML file with {CONFIG_FLAG}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; write lines such as port = 8080") from error
    for key, value in table.items():
        option = BY_NAME.get(key)
        if option is None:
            raise ConfigError(f"{path}: unknown key {key!r}{closest_hint(key, BY_NAME)}")
        if isinstance(value, dict | list):
            raise ConfigError(f"{path}: {key} must be a single value; several go into one text, with commas")
        layer.set(option, _toml_text(option, value), str(path), f"{path}: {key}")
    return layer


def _toml_text(option: Option, value: object) -> str:
    """Write a value as a flag would have it; true and false are 1 and 0 where those are the choices."""
    if isinstance(value, bool) and set(option.choices) == {"0", "1"}:
        return "1" if value else "0"
    return str(value)


def _read_environment(environ: Mapping[str, str]) -> _Layer:
    layer = _Layer("environment")
    for name, text in environ.items():
        option = _BY_ENV.get(name)
        if option is not None:
            if text:  # an empty variable is an unset one, as compose files write it
                layer.set(option, text, name, name)
        elif name in WITHOUT_EFFECT:
            if text:
                layer.ignore(name, text)
        elif name.startswith(ENV_PREFIX) and name not in (CONFIG_FILE_ENV, CPU_TIER_ENV, *START_SCRIPT_ENV):
            _refuse_variable(name)
    tier = environ.get(CPU_TIER_ENV, "")
    if tier:
        if tier not in CPU_TIER_MODES:
            raise ConfigError(f"{CPU_TIER_ENV} is {tier!r}, must be one of 0, 1; GLM53_MODE says the same")
        layer.set(BY_NAME["mode"], CPU_TIER_MODES[tier], CPU_TIER_ENV, CPU_TIER_ENV)
    return layer


def _refuse_variable(name: str) -> None:
    for prefix, reason in REFUSED_PREFIXES.items():
        if name.startswith(prefix):
            raise ConfigError(f"{name}: {reason}; unset it")
    hint = closest_hint(name, _VARIABLES) or "; unset it, `glm53srv --help` lists the variables"
    raise ConfigError(f"unknown environment variable {name}{hint}")


def _read_arguments(argv: Sequence[str]) -> tuple[_Layer, str | None]:
    """Give what the flags set, and the file that --config names."""
    layer = _Layer("command line")
    config_file: str | None = None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if flag not in _FLAGS and flag not in WITHOUT_EFFECT:
            kind = "option" if word.startswith("-") else "argument"
            hint = closest_hint(flag, _FLAGS) or "; `glm53srv --help` lists the options"
            raise ConfigError(f"unknown {kind} {word!r}{hint}")
        if not equals:
            if not rest or rest[0].partition("=")[0] in _FLAGS:
                raise ConfigError(f"{flag} needs a value; `glm53srv --help` says which")
            text = rest.pop(0)
        if flag == CONFIG_FLAG:
            config_file = text
        elif flag in WITHOUT_EFFECT:
            layer.ignore(flag, text)
        else:
            layer.set(_BY_FLAG[flag], text, flag, flag)
    return layer, config_file
