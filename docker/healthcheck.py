"""Ask the server of this container whether it takes requests: exit code 0 for yes. For HEALTHCHECK.

    healthcheck.py [PID]      PID: the server's process, 1 by default

The server may listen on another port than the image's, or on a socket file, or speak TLS: options come from
variables, GLM53_ARGS and the command line. What it was really started with stands in its process, so that is
read, with the rules of the server itself.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from pathlib import Path

from glm53srv.config import ServerConfig, load_config
from glm53srv.errors import Glm53Error

TIMEOUT_S = 2.5


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the file in place of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def main(argv: list[str]) -> int:
    """Ask /health; prints its body. 1 when it is not 200, or nothing answers."""
    process = Path("/proc") / (argv[0] if argv else "1")
    try:
        connection = connect(server_config(process))
        connection.request("GET", "/health")
        answer = connection.getresponse()
        print(answer.status, answer.read().decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException, Glm53Error) as error:
        print(f"no answer: {error}")
        return 1
    return 0 if answer.status == http.client.OK else 1


def server_config(process: Path) -> ServerConfig:
    """Read how a running `glm53srv serve` was configured, from its folder in /proc."""
    words = _strings(process / "cmdline")
    argv = words[words.index("serve") + 1 :] if "serve" in words else []
    environ = dict(pair.split("=", 1) for pair in _strings(process / "environ") if "=" in pair)
    return load_config(argv, environ).server


def connect(server: ServerConfig) -> http.client.HTTPConnection:
    """Give a connection to a server of this machine; its certificate is for other names, and not checked."""
    if server.unix_socket is not None:
        return UnixConnection(server.unix_socket)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    if server.tls_cert is None:
        return http.client.HTTPConnection(host, server.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, server.port, timeout=TIMEOUT_S, context=context)


def _strings(path: Path) -> list[str]:
    return [text.decode("utf-8", "replace") for text in path.read_bytes().split(b"\0") if text]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
