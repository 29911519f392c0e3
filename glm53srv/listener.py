"""The socket the server listens on: a port, or a file."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from glm53srv.config import ServerConfig
from glm53srv.errors import ConfigError
from glm53srv.port_owner import port_owner


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
        owner = port_owner(config.port) if error.errno == errno.EADDRINUSE else ""
        taken = f"{error.strerror} ({owner})" if owner else error.strerror
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {taken}; choose with --port and --host"
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
