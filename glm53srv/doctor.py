"""What this machine can run, and why: findings that `doctor` prints and `serve` heeds before it loads.

Each finding is one line. A FATAL one would make loading or serving fail; a WARNING costs speed.
"""

from __future__ import annotations

import enum
import platform
import socket
import ssl
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from glm53srv import __version__
from glm53srv.config import Config, EngineConfig, ServerConfig
from glm53srv.engine.factory import CPU_CHUNK_TOKENS, choose_engine
from glm53srv.errors import CheckpointError, ConfigError, Glm53Error, MachineError
from glm53srv.machine import MachineFacts

if TYPE_CHECKING:  # numpy and the native library are imported only when a check needs them
    from glm53srv.model.plan import MemoryPlan

GIB = 2**30
PACKAGES = ("numpy", "tokenizers", "starlette", "hypercorn", "uvloop", "orjson", "cffi", "llguidance")


class Severity(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing. error: what `serve` raises for a FATAL one."""

    name: str
    severity: Severity
    text: str
    error: Glm53Error | None = None

    @staticmethod
    def fatal(name: str, error: Glm53Error) -> Finding:
        """Wrap an error that would stop the server."""
        return Finding(name, Severity.FATAL, str(error), error)


def examine(config: Config, machine: MachineFacts) -> list[Finding]:
    """Check everything, in the order in which it would fail. Reads file headers only; allocates nothing."""
    return [
        _check_software(),
        *_check_processor(config.engine, machine),
        _check_engine(config.engine, machine),
        *_check_model(config.engine, machine),
        *_check_tls(config.server),
        _check_port(config.server),
    ]


def require_servable(config: Config, machine: MachineFacts) -> None:
    """Raise the error of the first FATAL finding, if there is one."""
    for finding in examine(config, machine):
        if finding.error is not None:
            raise finding.error


def report(findings: list[Finding]) -> str:
    """Lay the findings out for a terminal, with a verdict at the end."""
    lines = [f"{item.severity.value:>8}  {item.name}: {item.text}" for item in findings]
    num_fatal = sum(item.severity is Severity.FATAL for item in findings)
    verdict = "this machine can serve the model" if not num_fatal else f"{num_fatal} of these must be mended"
    return "\n".join([*lines, "", verdict])


def as_json(findings: list[Finding]) -> dict[str, object]:
    """Give the findings as a JSON object: {"ok": bool, "findings": [{"name", "severity", "text"}]}."""
    items = [{"name": item.name, "severity": item.severity.value, "text": item.text} for item in findings]
    return {"ok": all(item.severity is not Severity.FATAL for item in findings), "findings": items}


def _check_software() -> Finding:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return Finding(
        "software", Severity.OK, f"glm53srv {__version__}, Python {platform.python_version()}, {versions}"
    )


def _check_processor(config: EngineConfig, machine: MachineFacts) -> list[Finding]:
    from glm53srv.kernels import Isa, cpu_features

    cores = f"{machine.num_physical_cores} physical cores of {machine.num_cores} usable"
    found = [Finding("processor", Severity.OK, f"{machine.cpu_model}, {cores}, {config.threads} threads")]
    if config.threads > machine.num_cores:
        text = f"{config.threads} threads on {machine.num_cores} cores wait for each other; use fewer"
        found.append(Finding("threads", Severity.WARNING, text))
    try:
        features = cpu_features()
    except MachineError as error:
        return [*found, Finding.fatal("kernels", error)]
    tiers = ", ".join(isa.name.lower() for isa in features.isas)
    wanted = Isa[config.isa.upper()]
    if wanted is not Isa.AUTO and wanted not in features.isas:
        text = f"--isa {config.isa}: this CPU or this build has only {tiers}"
        return [*found, Finding.fatal("kernels", MachineError(text))]
    if max(features.isas) is Isa.SCALAR:
        text = "no AVX2, FMA and F16C: the scalar kernels are used, which are many times slower"
        return [*found, Finding("kernels", Severity.WARNING, text)]
    mode = "" if features.mode == "api" else ", through cffi's ABI mode (no Python.h when they were built)"
    return [*found, Finding("kernels", Severity.OK, f"{tiers}{mode}")]


def _check_engine(config: EngineConfig, machine: MachineFacts) -> Finding:
    try:
        choice = choose_engine(config, machine)
    except MachineError as error:
        return Finding.fatal("engine", error)
    severity = Severity.WARNING if machine.nvidia_devices else Severity.NOTE
    return Finding("engine", severity, f"{choice.name} ({choice.reason})")


def _check_model(config: EngineConfig, machine: MachineFacts) -> list[Finding]:
    from glm53srv.model.checkpoint import Checkpoint
    from glm53srv.model.config import load_model_config
    from glm53srv.model.plan import plan_memory
    from glm53srv.model.state import PAGE_TOKENS
    from glm53srv.model.tensor_needs import all_needs
    from glm53srv.model.vocabulary import count_token_ids

    try:
        model = load_model_config(config.model_dir)
        checkpoint = Checkpoint(config.model_dir)
        needs = list(all_needs(model))
        checkpoint.check(needs)
        count_token_ids(config.model_dir, model.vocab_size)
    except CheckpointError as error:
        return [Finding.fatal("checkpoint", error)]
    weight_bytes = checkpoint.needed_bytes(needs)
    kind = "random weights, it speaks nonsense" if model.is_random else f"{model.num_layers} layers"
    text = f"{config.model_dir}: {kind}, {weight_bytes / GIB:.2f} GiB of weights"
    severity = Severity.NOTE if model.is_random else Severity.OK
    plan = plan_memory(
        model,
        weight_bytes,
        -(-config.cache_tokens // PAGE_TOKENS),
        config.max_streams,
        config.chunk_tokens or CPU_CHUNK_TOKENS,
    )
    return [Finding("checkpoint", severity, text), _check_memory(plan, machine)]


def _check_memory(plan: MemoryPlan, machine: MachineFacts) -> Finding:
    parts = (
        f"weights {plan.mapped_bytes / GIB:.2f} + float32 copies {plan.converted_bytes / GIB:.2f} + "
        f"cache {plan.cache_bytes / GIB:.2f} + states {plan.state_bytes / GIB:.2f} + "
        f"activations {plan.activation_bytes / GIB:.2f} GiB"
    )
    if plan.total_bytes <= machine.usable_bytes:
        return Finding("memory", Severity.OK, f"{parts}, of {machine.usable_bytes / GIB:.1f} GiB usable")
    usable = f"{machine.usable_bytes / GIB:.1f}"
    if machine.limit_bytes is not None:
        usable += f" (control group limit {machine.limit_bytes / GIB:.1f})"
    text = (
        f"too little memory: {parts} = {plan.total_bytes / GIB:.1f} GiB, usable {usable}; free some, "
        "use a smaller --cache-tokens, or a smaller checkpoint"
    )
    return Finding.fatal("memory", MachineError(text))


def _check_tls(config: ServerConfig) -> list[Finding]:
    if config.tls_cert is None or config.tls_key is None:
        return []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password to offer, a protected key is an error and not a question on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        text = f"--tls-cert {config.tls_cert} with --tls-key {config.tls_key} cannot be used: {reason}"
        return [Finding.fatal("tls", ConfigError(text))]
    return [Finding("tls", Severity.OK, f"certificate {config.tls_cert}")]


def _check_port(config: ServerConfig) -> Finding:
    try:
        close_socket(open_socket(config), config)
    except ConfigError as error:
        return Finding.fatal("port", error)
    where = f"{config.host}:{config.port}" if config.port else f"{config.host}, a free port"
    if config.unix_socket is not None:
        where = str(config.unix_socket)
    return Finding("port", Severity.OK, f"{where} can be listened on")


def open_socket(config: ServerConfig) -> socket.socket:
    """Open the listening socket, for close_socket() in the end.

    Raises ConfigError that says how to choose another.
    """
    if config.unix_socket is not None:
        return _open_unix_socket(config.unix_socket)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Ending a stream does not free the socket of a client that never reads: the
        # last bytes wait in it, for ever if the client acknowledges probes. The kernel gives up after this.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout_s * 1000))
        opened.bind((config.host, config.port))
        opened.listen(1024)
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose with --port and --host"
        ) from error
    return opened


def close_socket(listener: socket.socket, config: ServerConfig) -> None:
    """Close what open_socket() opened; a socket file goes too."""
    listener.close()
    remove_socket_file(config)


def remove_socket_file(config: ServerConfig) -> None:
    """Remove the socket file, if the server listens on one."""
    if config.unix_socket is not None:
        config.unix_socket.unlink(missing_ok=True)


def _open_unix_socket(path: Path) -> socket.socket:
    """Open a socket file; one that a dead server left behind is replaced, anything else is an error."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        opened.bind(str(path))
        opened.listen(1024)
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}; choose with --unix-socket"
        ) from error
    return opened


def _is_answered(path: Path) -> bool:
    """Tell whether somebody listens on a socket file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
