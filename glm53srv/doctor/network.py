"""Checks of what a server opens beside the model: port, certificate, file of the heat."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from glm53srv.config import ServerConfig
from glm53srv.doctor.findings import Finding, fatal, ok, warn, wrap
from glm53srv.errors import ConfigError
from glm53srv.listener import close_socket, open_socket


def check_tls(config: ServerConfig) -> list[Finding]:
    """Load the certificate and its key."""
    if config.tls_cert is None or config.tls_key is None:
        return []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password to offer, a protected key is an error and not a question on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        text = f"--tls-cert {config.tls_cert} with --tls-key {config.tls_key} cannot be used: {reason}"
        remedy = "name a PEM certificate chain and its own key without a password"
        return [fatal("tls", ConfigError(text), remedy)]
    return [ok("tls", f"certificate {config.tls_cert}")]


def check_heat(path: Path | None) -> list[Finding]:
    """Check that the experts' heat can be saved; without it a server runs all the same."""
    if path is None:
        return []
    if os.access(path.parent, os.W_OK) and not path.is_dir():
        return [ok("heat", f"kept in {path}")]
    text = f"{path} cannot be written, so the next start begins cold"
    return [warn("heat", text, "name a file in a directory of this user with GLM53_EC_HEAT")]


def check_port(config: ServerConfig) -> Finding:
    """Listen for a moment."""
    try:
        close_socket(open_socket(config), config)
    except ConfigError as error:
        return wrap("port", error)
    where = f"{config.host}:{config.port}" if config.port else f"{config.host}, a free port"
    if config.unix_socket is not None:
        where = str(config.unix_socket)
    return ok("port", f"{where} can be listened on")
