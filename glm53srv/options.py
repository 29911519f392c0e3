"""The table of options, and how one value of each is read from text. config.py merges the sources.

A table of our own and not argparse: the same rows also serve the environment, the file, --help and the
documentation, and an unknown name must come with the closest known one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm53srv.errors import ConfigError
from glm53srv.option import Option
from glm53srv.options_download import DOWNLOAD_OPTIONS
from glm53srv.options_offload import OFFLOAD_OPTIONS

OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        ("--model", "-m"),
        "GLM53_MODEL_DIR",
        "path",
        None,
        "directory of the EXL3 checkpoint",
        "model",
    ),
    Option(
        "engine",
        ("--engine",),
        "GLM53_ENGINE",
        "choice",
        "auto",
        "what executes the steps",
        "model",
        choices=("auto", "cpu", "cuda"),
    ),
    Option(
        "mode",
        ("--mode",),
        "GLM53_MODE",
        "choice",
        "fast",
        "fast may compute cold experts on the CPU; exact equals the stock kernels (CUDA engine only)",
        "model",
        choices=("fast", "exact"),
        refusals=dict.fromkeys(
            ("nvme", "nvme-exact", "nvme1", "nvme2", "nvme3"), "there is no NVMe mode, all experts lie in RAM"
        ),
    ),
    *DOWNLOAD_OPTIONS,
    Option(
        "cache_tokens",
        ("--cache-tokens", "-cs"),
        "GLM53_CACHE_TOKENS",
        "int",
        131072,
        "room of the paged cache, shared by all streams; a sequence is at most this long",
        "model",
        unit="tokens",
        minimum=256,
    ),
    Option(
        "max_streams",
        ("--max-streams", "--max-batch-size", "-ambs"),
        "GLM53_MAX_STREAMS",
        "int",
        4,
        "sequences that decode together",
        "model",
        minimum=1,
    ),
    Option(
        "chunk_tokens",
        ("--chunk-tokens", "-chunk_size"),
        "GLM53_CHUNK_TOKENS",
        "int",
        None,
        "prompt tokens per prefill chunk (default 512 on the CPU)",
        "model",
        unit="tokens",
        minimum=1,
    ),
    Option(
        "threads",
        ("--threads",),
        "GLM53_THREADS",
        "int",
        None,
        "threads of the native pool (default: physical cores, less two from eight on)",
        "CPU kernels",
        minimum=1,
    ),
    Option(
        "isa",
        ("--isa",),
        "GLM53_ISA",
        "choice",
        "auto",
        "instruction set of the native kernels",
        "CPU kernels",
        choices=("auto", "scalar", "avx2", "avx512", "amx"),
    ),
    Option(
        "precision",
        ("--precision",),
        "GLM53_PRECISION",
        "choice",
        "exact32",
        "arithmetic of the quantised linears on the CPU engine",
        "CPU kernels",
        choices=("exact32", "fast16"),
    ),
    *OFFLOAD_OPTIONS,
    Option(
        "max_queue",
        ("--max-queue",),
        "GLM53_MAX_QUEUE",
        "int",
        64,
        "requests that may wait; one more gets 429",
        "scheduler",
        minimum=0,
    ),
    Option(
        "target_gap_ms",
        ("--target-gap-ms",),
        "GLM53_TARGET_GAP_MS",
        "float",
        200.0,
        "wanted time between tokens of running streams while a prompt is read",
        "scheduler",
        unit="ms",
        minimum=1,
    ),
    Option(
        "host",
        ("--host",),
        "GLM53_HOST",
        "str",
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for every interface",
        "server",
    ),
    Option(
        "port",
        ("--port",),
        "PORT",
        "int",
        30000,
        "port to listen on; 0 takes a free one",
        "server",
        minimum=0,
        maximum=65535,
    ),
    Option(
        "served_name",
        ("--served-name",),
        "SERVED_NAME",
        "str",
        None,
        "model name in the API (default: glm-5.3-flash; glm53srv-demo or random-weights for those two)",
        "server",
    ),
    Option(
        "max_body_mib",
        ("--max-body-mib",),
        "GLM53_MAX_BODY_MIB",
        "int",
        32,
        "largest request body",
        "server",
        unit="MiB",
        minimum=1,
    ),
    Option(
        "drain_timeout_s",
        ("--drain-timeout-s",),
        "GLM53_DRAIN_TIMEOUT_S",
        "float",
        30.0,
        "time that running streams get to end after SIGTERM",
        "server",
        unit="s",
        minimum=0,
    ),
    Option(
        "keep_alive_s",
        ("--keep-alive-s",),
        "GLM53_KEEP_ALIVE_S",
        "float",
        10.0,
        "silence after which a stream sends a comment, so that proxies keep it open",
        "server",
        unit="s",
        minimum=0.1,
    ),
    Option(
        "queue_timeout_s",
        ("--queue-timeout-s",),
        "GLM53_QUEUE_TIMEOUT_S",
        "float",
        None,
        "longest wait for a slot; then 503 (default: no limit)",
        "limits",
        unit="s",
        minimum=0.001,
    ),
    Option(
        "request_timeout_s",
        ("--request-timeout-s",),
        "GLM53_REQUEST_TIMEOUT_S",
        "float",
        None,
        "longest time from the request to its last token; then 504, or an error event in a stream "
        "(default: no limit)",
        "limits",
        unit="s",
        minimum=0.001,
    ),
    Option(
        "body_timeout_s",
        ("--body-timeout-s",),
        "GLM53_BODY_TIMEOUT_S",
        "float",
        120.0,
        "time in which a request body must arrive",
        "limits",
        unit="s",
        minimum=0.001,
    ),
    Option(
        "write_timeout_s",
        ("--write-timeout-s",),
        "GLM53_WRITE_TIMEOUT_S",
        "float",
        60.0,
        "how long a client may not read before its connection is closed",
        "limits",
        unit="s",
        minimum=0.1,
    ),
    Option(
        "api_key",
        ("--api-key",),
        "GLM53_API_KEY",
        "str",
        None,
        "keys of which a request must give one, separated by commas; better in the variable than on the "
        "command line, which every user of the machine can read",
        "access",
        is_secret=True,
    ),
    Option(
        "cors_origins",
        ("--cors-origins",),
        "GLM53_CORS_ORIGINS",
        "str",
        None,
        "origins of web pages that may call the server, separated by commas; * for all",
        "access",
    ),
    Option(
        "tls_cert",
        ("--tls-cert",),
        "GLM53_TLS_CERT",
        "path",
        None,
        "certificate chain (PEM); with --tls-key the server speaks HTTPS",
        "access",
    ),
    Option(
        "tls_key",
        ("--tls-key",),
        "GLM53_TLS_KEY",
        "path",
        None,
        "private key of the certificate (PEM, without a password)",
        "access",
    ),
    Option(
        "unix_socket",
        ("--unix-socket",),
        "GLM53_UNIX_SOCKET",
        "path",
        None,
        "listen on this socket file in place of host and port",
        "access",
    ),
    Option(
        "log_level",
        ("--log-level",),
        "GLM53_LOG_LEVEL",
        "choice",
        "info",
        "least severe log lines to print",
        "server",
        choices=("debug", "info", "warning", "error"),
    ),
)


def grouped() -> dict[str, list[Option]]:
    """Give the options by group, both in the order of the table."""
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS:
        groups.setdefault(option.group, []).append(option)
    return groups


def operand(option: Option) -> str:
    """Give what stands for the value in --help."""
    words = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT"}
    return "|".join(option.choices) or words[option.kind]


def usage() -> str:
    """The options part of --help, grouped, with unit, default and variable name."""
    lines = ["", "configuration:", "  --config PATH"]
    lines.append(
        "        TOML file of option names and values [GLM53_CONFIG, default ./glm53srv.toml if there]"
    )
    for group, options in grouped().items():
        lines += ["", f"{group}:"]
        for option in options:
            default = "" if option.default is None else f", default {option.default}"
            unit = f" in {option.unit}" if option.unit else ""
            lines.append(f"  {', '.join(option.flags)} {operand(option)}")
            lines.append(f"        {option.help} [{option.env}{unit}{default}]")
    return "\n".join(lines)


def parse_value(option: Option, text: str, where: str) -> Any:
    """Turn text into the option's type. Raises ConfigError that names where the text stood."""
    if option.kind == "choice":
        if text not in option.choices:
            known = dict.fromkeys(option.choices)
            hint = option.refusals.get(text) or closest_hint(text, known).removeprefix(", ")
            must = f"{where} is {text!r}, must be one of {', '.join(option.choices)}"
            raise ConfigError(f"{must}; {hint}" if hint else must)
        return text
    if option.kind == "path":
        if not text:
            raise ConfigError(f"{where} is empty, must be a path")
        return Path(text).expanduser()
    if option.kind == "str":
        return text
    try:
        number: float = int(text) if option.kind == "int" else float(text)
    except ValueError:
        wanted = "a whole number" if option.kind == "int" else "a number"
        raise ConfigError(f"{where} is {text!r}, must be {wanted}") from None
    if not math.isfinite(number):
        raise ConfigError(f"{where} is {text}, must be a finite number")
    if option.minimum is not None and number < option.minimum:
        raise ConfigError(f"{where} is {text}, must be at least {option.minimum:g}")
    if option.maximum is not None and number > option.maximum:
        raise ConfigError(f"{where} is {text}, must be at most {option.maximum:g}")
    return number


def closest_hint(word: str, known: Mapping[str, object]) -> str:
    """Text to append to an error about an unknown name: the closest known one, or nothing."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {match[0]}?" if match else ""
