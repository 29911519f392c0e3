"""Configuration: one table of options, four sources, frozen results. The only reader of the environment.

Sources, the later wins: default, file (TOML), environment, command line; inside one level the last value
wins. The file is GLM53_CONFIG, or ./glm53srv.toml if it is there. Keys of the file are option names (`port =
8080`). Every unknown flag, key or GLM53_* variable is an error that names the closest option.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from glm53srv.errors import ConfigError
from glm53srv.machine import read_machine
from glm53srv.options import OPTIONS, closest_hint, parse_value

ENV_PREFIX = "GLM53_"
DEFAULT_CONFIG_FILE = "glm53srv.toml"

Source = Literal["default", "file", "environment", "command line"]

HIDDEN = "(hidden)"
"""Shown in place of a secret."""

CONFIG_FILE_ENV = "GLM53_CONFIG"
_BY_NAME = {option.name: option for option in OPTIONS}
_BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
_BY_ENV = {option.env: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Where routed experts live and who computes them. Times in ms, sizes in GiB; None: decided at start.

    kind: "off" or "simulate". ct_swz is not None when GLM53_CT_SWZ was given, which changes nothing.
    """

    kind: str = "off"
    ct_cpus: str = "auto"
    ct_threads: int | None = None
    ct_a_ms: float | None = None
    ct_b_ms: float | None = None
    ct_tzc_ms: float | None = None
    ct_swz: str | None = None
    max_slots: int | None = None
    stage_gib: float = 2.6
    elastic_gib: float = 10.0
    reserve_gib: float | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine factory needs. Sizes in tokens; None where the engine chooses its own default."""

    model_dir: Path
    engine: str = "auto"
    mode: str = "fast"
    cache_tokens: int = 131072
    max_streams: int = 4
    chunk_tokens: int | None = None
    threads: int = 1
    isa: str = "auto"
    precision: str = "exact32"
    offload: OffloadConfig = OffloadConfig()


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Admission and interleaving; see scheduler/scheduler.py."""

    max_queue: int = 64
    target_gap_s: float = 0.2


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side.

    api_keys: a request must give one of them; empty: none is asked for. cors_origins: empty: no page may
    call. unix_socket replaces host and port. Timeouts in seconds, None: no limit.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_name: str | None = None
    max_body_bytes: int = 32 * 2**20
    drain_timeout_s: float = 30.0
    keep_alive_s: float = 10.0
    log_level: str = "info"
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None
    body_timeout_s: float = 120.0
    write_timeout_s: float = 60.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    unix_socket: Path | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """Everything, resolved.

    values, sources: what was set and where it came from, by option name; defaults are left out, and secrets
    are hidden.
    """

    engine: EngineConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    values: Mapping[str, object] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """Raw option values after the sources are merged, before resolve()."""

    values: Mapping[str, Any]
    sources: Mapping[str, Source]

    def with_default_model(self, model_dir: Path) -> Settings:
        """Take a model where none is named. It is told with the options that were set: one has to see it."""
        if self.values["model"] is not None:
            return self
        return replace(
            self,
            values={**self.values, "model": model_dir},
            sources={**self.sources, "model": "default"},
        )


def load_config(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, *, default_model: Path | None = None
) -> Config:
    """Merge all sources and resolve them.

    argv: command line arguments without program and subcommand. environ: None means the process environment.
    default_model: what to take when no source names a model. Raises ConfigError, one line.
    """
    settings = read_settings(argv, os.environ if environ is None else environ)
    if default_model is not None:
        settings = settings.with_default_model(default_model)
    return resolve(settings, read_machine().num_physical_cores)


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Merge defaults, file, environment and command line. Raises ConfigError."""
    values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    sources: dict[str, Source] = {}
    layers: tuple[tuple[Source, dict[str, Any]], ...] = (
        ("file", _read_file(environ)),
        ("environment", _read_environment(environ)),
        ("command line", _read_arguments(argv)),
    )
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    return Settings(values, sources)


def resolve(settings: Settings, num_cores: int) -> Config:
    """Compute derived values into a new object. Raises ConfigError when no model is named."""
    values = settings.values
    if values["model"] is None:
        raise ConfigError(
            "no model: give --model DIR or set GLM53_MODEL_DIR (make a small random one with "
            "`glm53srv pack random --out DIR`)"
        )
    threads = values["threads"]
    return Config(
        engine=EngineConfig(
            model_dir=values["model"],
            engine=values["engine"],
            mode=values["mode"],
            cache_tokens=values["cache_tokens"],
            max_streams=values["max_streams"],
            chunk_tokens=values["chunk_tokens"],
            threads=threads if threads is not None else default_threads(num_cores),
            isa=values["isa"],
            precision=values["precision"],
            offload=_offload_config(values),
        ),
        scheduler=SchedulerConfig(
            max_queue=values["max_queue"], target_gap_s=values["target_gap_ms"] / 1000.0
        ),
        server=_server_config(values),
        values={name: HIDDEN if _BY_NAME[name].is_secret else values[name] for name in settings.sources},
        sources=settings.sources,
    )


def _offload_config(values: Mapping[str, Any]) -> OffloadConfig:
    return OffloadConfig(
        kind=values["offload"],
        ct_cpus=values["ct_cpus"],
        ct_threads=values["ct_threads"],
        ct_a_ms=values["ct_a"],
        ct_b_ms=values["ct_b"],
        ct_tzc_ms=values["ct_tzc"],
        ct_swz=values["ct_swz"],
        max_slots=values["ec_max_slots"],
        stage_gib=values["ec_stage_gb"],
        elastic_gib=values["ec_elastic_gb"],
        reserve_gib=values["ec_reserve_gb"],
    )


def _server_config(values: Mapping[str, Any]) -> ServerConfig:
    if (values["tls_cert"] is None) != (values["tls_key"] is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both or none")
    return ServerConfig(
        host=values["host"],
        port=values["port"],
        served_name=values["served_name"],
        max_body_bytes=values["max_body_mib"] * 2**20,
        drain_timeout_s=values["drain_timeout_s"],
        keep_alive_s=values["keep_alive_s"],
        log_level=values["log_level"],
        queue_timeout_s=values["queue_timeout_s"],
        request_timeout_s=values["request_timeout_s"],
        body_timeout_s=values["body_timeout_s"],
        write_timeout_s=values["write_timeout_s"],
        api_keys=_api_keys(values["api_key"]),
        cors_origins=_split(values["cors_origins"]),
        tls_cert=values["tls_cert"],
        tls_key=values["tls_key"],
        unix_socket=values["unix_socket"],
    )


def _api_keys(text: str | None) -> tuple[str, ...]:
    """Split keys. A setting without any key in it is an error: somebody believes to be protected."""
    keys = _split(text)
    if text is not None and not keys:
        raise ConfigError("GLM53_API_KEY holds no key; set one, or leave it unset to serve without keys")
    if any(not 0x21 <= ord(char) <= 0x7E for key in keys for char in key):
        raise ConfigError("GLM53_API_KEY: a key may hold only visible ASCII characters")
    return keys


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def default_threads(num_cores: int) -> int:
    """Threads of the native pool: the physical cores; from eight on, two stay free for the rest."""
    return num_cores if num_cores < 8 else num_cores - 2


def describe(config: Config) -> list[str]:
    """Name every value that is not a default, with its source: lines like `port = 8080 (environment)`."""
    return [f"{name} = {config.values[name]} ({source})" for name, source in config.sources.items()]


def _read_file(environ: Mapping[str, str]) -> dict[str, Any]:
    named = environ.get(CONFIG_FILE_ENV)
    path = Path(named if named else DEFAULT_CONFIG_FILE)
    if not named and not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    values = {}
    for key, value in table.items():
        option = _BY_NAME.get(key)
        if option is None:
            raise ConfigError(f"{path}: unknown key {key!r}{closest_hint(key, _BY_NAME)}")
        if isinstance(value, dict | list):
            raise ConfigError(f"{path}: {key} must be a single value")
        values[key] = parse_value(option, str(value), f"{path}: {key}")
    return values


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in environ.items():
        option = _BY_ENV.get(name)
        if option is not None:
            if text != "":  # an empty variable is an unset one, as compose files write it
                values[option.name] = parse_value(option, text, name)
        elif name.startswith(ENV_PREFIX) and name != CONFIG_FILE_ENV:
            raise ConfigError(f"unknown environment variable {name}{closest_hint(name, _BY_ENV)}")
    return values


def _read_arguments(argv: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        option = _BY_FLAG.get(flag)
        if option is None:
            kind = "option" if word.startswith("-") else "argument"
            raise ConfigError(f"unknown {kind} {word!r}{closest_hint(flag, _BY_FLAG)}")
        if not equals:
            if not rest:
                raise ConfigError(f"{flag} needs a value")
            text = rest.pop(0)
        values[option.name] = parse_value(option, text, flag)
    return values
