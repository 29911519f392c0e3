"""The table of options, and how one value of each is read from text. config.py merges the sources.

A table of our own and not argparse: the same rows also serve the environment, the file, --help and the
documentation, and an unknown name must come with the closest known one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glm53srv.errors import ConfigError

Kind = Literal["str", "path", "int", "float", "choice"]


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `name` is the key in the file and the attribute in Settings; flags and env are its other
    names.

    minimum, maximum: bounds of a number, or None. unit and help go into --help and the documentation.
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
    ),
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
        choices=("auto", "scalar", "avx2", "avx512"),
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
    Option(
        "offload",
        ("--offload",),
        "GLM53_OFFLOAD",
        "choice",
        "off",
        "simulate runs the routed experts through arena, cache slots and CPU workers, as a GPU would",
        "offload",
        choices=("off", "simulate"),
    ),
    Option(
        "ct_cpus",
        ("--ct-cpus",),
        "GLM53_CT_CPUS",
        "str",
        "auto",
        "CPUs of the expert workers: auto, or a list such as 2-23; auto leaves the first two cores free",
        "offload",
    ),
    Option(
        "ct_threads",
        ("--ct-threads",),
        "GLM53_CT_THREADS",
        "int",
        None,
        "expert workers (default: one per CPU of --ct-cpus)",
        "offload",
        minimum=1,
        maximum=1024,
    ),
    Option(
        "ct_a",
        ("--ct-a",),
        "GLM53_CT_A",
        "float",
        None,
        "fixed time of a job for the expert workers (default: measured)",
        "offload",
        unit="ms",
        minimum=0,
    ),
    Option(
        "ct_b",
        ("--ct-b",),
        "GLM53_CT_B",
        "float",
        None,
        "time of one expert on the expert workers (default: measured)",
        "offload",
        unit="ms",
        minimum=0.0001,
    ),
    Option(
        "ct_tzc",
        ("--ct-tzc",),
        "GLM53_CT_TZC",
        "float",
        None,
        "time of one expert that the GPU reads over the link (default: measured)",
        "offload",
        unit="ms",
        minimum=0.0001,
    ),
    Option(
        "ct_swz",
        ("--ct-swz",),
        "GLM53_CT_SWZ",
        "str",
        None,
        "accepted and ignored: there is one layout of the experts",
        "offload",
    ),
    Option(
        "ec_max_slots",
        ("--ec-max-slots",),
        "GLM53_EC_MAX_SLOTS",
        "int",
        None,
        "experts in the cache at most (default: what memory holds)",
        "offload",
        minimum=1,
    ),
    Option(
        "ec_stage_gb",
        ("--ec-stage-gb",),
        "GLM53_EC_STAGE_GB",
        "float",
        2.6,
        "size of each of two staging buffers of a prefill",
        "offload",
        unit="GiB",
        minimum=0,
    ),
    Option(
        "ec_elastic_gb",
        ("--ec-elastic-gb",),
        "GLM53_EC_ELASTIC_GB",
        "float",
        10.0,
        "part of the cache that a prefill may borrow",
        "offload",
        unit="GiB",
        minimum=0,
    ),
    Option(
        "ec_reserve_gb",
        ("--ec-reserve-gb",),
        "GLM53_EC_RESERVE_GB",
        "float",
        None,
        "GPU memory that stays free (default: 1.5 in fast mode, 1.0 in exact mode)",
        "offload",
        unit="GiB",
        minimum=0,
    ),
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
        "model name in the API (default: glm-5.3-flash, or random-weights for the random model)",
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


def usage() -> str:
    """The options part of --help, grouped, with unit, default and variable name."""
    lines: list[str] = []
    group = ""
    for option in OPTIONS:
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        choices = "|".join(option.choices)
        operand = choices or {"int": "N", "float": "X", "path": "DIR", "str": "TEXT"}.get(option.kind, "")
        default = "" if option.default is None else f", default {option.default}"
        unit = f" in {option.unit}" if option.unit else ""
        lines.append(f"  {', '.join(option.flags)} {operand}")
        lines.append(f"        {option.help} [{option.env}{unit}{default}]")
    return "\n".join(lines)


def parse_value(option: Option, text: str, where: str) -> Any:
    """Turn text into the option's type. Raises ConfigError that names where the text stood."""
    if option.kind == "choice":
        if text not in option.choices:
            raise ConfigError(f"{where} is {text!r}, must be one of {', '.join(option.choices)}")
        return text
    if option.kind == "path":
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
