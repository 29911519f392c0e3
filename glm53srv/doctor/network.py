"""Checks of the port and the certificate."""

from __future__ import annotations

import ssl

from glm53srv.config import ServerConfig
from glm53srv.doctor.findings import Finding, fatal, ok, wrap
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
