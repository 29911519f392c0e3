"""Configuration: frozen results of the table of options and its sources. The only reader of the environment.

sources.py says which source wins and what is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm53srv.errors import ConfigError
from glm53srv.machine import read_machine
from glm53srv.sources import BY_NAME, Settings, Source, read_settings

HIDDEN = "(hidden)"
"""Shown in place of a secret."""

NO_MODEL = Path("(no model)")
"""EngineConfig.model_dir where none was named, for commands that can do without."""

NO_MODEL_TEXT = (
    "no model; give --model DIR or set GLM53_MODEL_DIR (make a small random one with "
    "`glm53srv pack random --out DIR`)"
)


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Where routed experts live and who computes them. Times in ms, sizes in GiB; None: decided at start.

    kind: "off" or "simulate". ct_swz is not None when GLM53_CT_SWZ was given, which changes nothing.
    """

    kind: str = "off"
    ct_cpus: str = "auto"
    ct_threads: int | None = None
    ct_prefill: int = 0
    ct_a_ms: float | None = None
    ct_b_ms: float | None = None
    ct_tzc_ms: float | None = None
    ct_swz: str | None = None
    ct_split: str = "parts"
    max_slots: int | None = None
    landing: int = 16
    ahead: int = 2
    stage_gib: float = 2.6
    elastic_gib: float = 12.0
    reserve_gib: float | None = None
    vram_gib: float | None = None
    heat_path: Path | None = None
    heat_interval_s: float = 600.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine factory needs. Sizes in tokens; None where the engine chooses its own default.

    tuning_dir: where what is found by timing on the GPU is kept, None where there is no place for it.
    cuda_graphs: whether a GPU's decode steps are captured.
    """

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
    tuning_dir: Path | None = None
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class DownloadConfig:
    """Where a missing model comes from.

    repo: None, nothing was named. revision: None, the default of the repository (see download.py).
    is_allowed: serve may fetch.
    """

    repo: str | None = None
    revision: str | None = None
    is_allowed: bool = True


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
    are hidden. ignored: lines about names that were accepted without effect.
    """

    engine: EngineConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    download: DownloadConfig = DownloadConfig()
    values: Mapping[str, object] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def load_config(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    num_cores: int | None = None,
    needs_model: bool = True,
    default_model: Path | None = None,
) -> Config:
    """Merge all sources and resolve them.

    argv: command line arguments without program and subcommand. environ: None means the process environment.
    num_cores: physical cores, None asks the machine. default_model: what to take when no source names a model
    or a repository to fetch one from. Raises ConfigError, one line.
    """
    environ = process_environment() if environ is None else environ
    settings = read_settings(argv, environ)
    if default_model is not None:
        settings = settings.with_default_model(default_model)
    cores = read_machine().num_physical_cores if num_cores is None else num_cores
    return resolve(settings, cores, needs_model=needs_model, cache_folder=find_cache_folder(environ))


def find_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Give this program's folder among the user's caches (XDG Base Directory), None without a home."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification: a relative path is ignored
        base = Path(environ.get("HOME", "")) / ".cache"
    return base / "glm53srv" if base.is_absolute() else None


def process_environment() -> Mapping[str, str]:
    """Give the environment of this process."""
    return os.environ


def resolve(
    settings: Settings, num_cores: int, *, needs_model: bool = True, cache_folder: Path | None = None
) -> Config:
    """Compute derived values into a new object. Raises ConfigError when no model is named but needed.

    cache_folder: the default of tuning_dir.
    """
    values = settings.values
    model_dir = values["model"]
    if model_dir is None:
        if needs_model:
            raise ConfigError(NO_MODEL_TEXT)
        model_dir = NO_MODEL
    threads = values["threads"]
    return Config(
        engine=EngineConfig(
            model_dir=model_dir,
            engine=values["engine"],
            mode=values["mode"],
            cache_tokens=values["cache_tokens"],
            max_streams=values["max_streams"],
            chunk_tokens=values["chunk_tokens"],
            threads=threads if threads is not None else default_threads(num_cores),
            isa=values["isa"],
            precision=values["precision"],
            offload=_offload_config(values),
            tuning_dir=values["tuning_dir"] or cache_folder,
            cuda_graphs=values["cuda_graphs"] == "on",
        ),
        scheduler=SchedulerConfig(
            max_queue=values["max_queue"], target_gap_s=values["target_gap_ms"] / 1000.0
        ),
        server=_server_config(values),
        download=DownloadConfig(
            repo=values["model_repo"],
            revision=values["model_revision"],
            is_allowed=values["model_download"] == "1",
        ),
        values={name: HIDDEN if BY_NAME[name].is_secret else values[name] for name in settings.sources},
        sources=settings.sources,
        ignored=settings.ignored,
    )


def _offload_config(values: Mapping[str, Any]) -> OffloadConfig:
    return OffloadConfig(
        kind=values["offload"],
        ct_cpus=values["ct_cpus"],
        ct_prefill=values["ct_prefill"],
        ct_threads=values["ct_threads"] or None,  # 0 in the original interface
        ct_a_ms=values["ct_a"],
        ct_b_ms=values["ct_b"],
        ct_tzc_ms=values["ct_tzc"],
        ct_swz=values["ct_swz"],
        ct_split=values["ct_split"],
        max_slots=values["ec_max_slots"],
        landing=values["ec_landing"],
        ahead=values["ec_ahead"],
        stage_gib=values["ec_stage_gb"],
        elastic_gib=values["ec_elastic_gb"],
        reserve_gib=values["ec_reserve_gb"],
        vram_gib=values["vram_gb"],
        heat_path=values["ec_heat"],
        heat_interval_s=60.0 * values["ec_heat_minutes"],
    )


def _server_config(values: Mapping[str, Any]) -> ServerConfig:
    if (values["tls_cert"] is None) != (values["tls_key"] is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both or none")
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
        raise ConfigError("GLM53_API_KEY may hold only visible ASCII characters; choose another key")
    return keys


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def default_threads(num_cores: int) -> int:
    """Threads of the native pool: the physical cores; from eight on, two stay free for the rest."""
    return num_cores if num_cores < 8 else num_cores - 2


def describe(config: Config) -> list[str]:
    """Name every value that is not a default, with its source: lines like `port = 8080 (environment)`."""
    given = [f"{name} = {config.values[name]} ({source})" for name, source in config.sources.items()]
    return [*given, *config.ignored]
