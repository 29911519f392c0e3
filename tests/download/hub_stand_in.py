"""A model hub on a loopback port: the list of a repository's files, and their bytes by way of a redirect.

What a test adds to `faults` happens to the next requests for a file, one each.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote

REPO = "maker/model"
COMMIT = "c" * 40
LARGE_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Fault:
    """What goes wrong once.

    status: answered in place of the file. cut_at: bytes of the answer after which the connection ends, with a
    reset if is_reset. ignores_range: the whole file comes. body: sent in place of the file's bytes. hold: the
    answer stops at cut_at until this is set.
    """

    status: int | None = None
    cut_at: int | None = None
    is_reset: bool = False
    ignores_range: bool = False
    body: bytes | None = None
    hold: threading.Event | None = None


@dataclass
class Refusal:
    """What the hub answers for a repository or revision. code: its X-Error-Code header."""

    status: int
    code: str | None = None


@dataclass
class HubStandIn:
    """A context manager. Files: path -> bytes, of the one repository; may be replaced between downloads.

    requests: (path, Range header or None) of every request for a file's bytes, in order of arrival.
    num_answers: to requests of any kind. token: must be given if set. sizes: what the list says in place of
    the true size.
    """

    files: Mapping[str, bytes]
    commit: str = COMMIT
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    refusal: Refusal | None = None
    token: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    num_answers: int = 0

    def __post_init__(self) -> None:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStandIn:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request: the list of files, a redirect to the bytes, or the bytes."""
        self.num_answers += 1
        path = unquote(request.path.partition("?")[0])
        if self.token is not None and request.headers["authorization"] != f"Bearer {self.token}":
            self._refuse(request, Refusal(401))
        elif self.refusal is not None:
            self._refuse(request, self.refusal)
        elif re.fullmatch(f"/api/models/{REPO}/revision/[^/]+", path):
            body = json.dumps({"id": REPO, "sha": self.commit, "siblings": self._siblings()}).encode()
            self._send(request, 200, {"content-type": "application/json"}, body)
        elif path.startswith(f"/{REPO}/resolve/{self.commit}/"):
            name = path.removeprefix(f"/{REPO}/resolve/{self.commit}/")
            headers = {
                "location": f"{self.url}/bytes/{name}",
                "x-repo-commit": self.commit,
                "x-linked-size": str(len(self.files[name])),
                "etag": '"x"',
            }
            self._send(request, 302, headers, b"")
        elif path.startswith("/bytes/"):
            self._send_file(request, path.removeprefix("/bytes/"))
        else:
            self._refuse(request, Refusal(404, "EntryNotFound"))

    def _siblings(self) -> list[dict[str, object]]:
        items: list[dict[str, object]] = []
        for name, data in self.files.items():
            size = self.sizes.get(name, len(data))
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            item: dict[str, object] = {"rfilename": name, "size": size, "blobId": blob}
            if name.endswith(LARGE_SUFFIX):
                sha256 = hashlib.sha256(data).hexdigest()
                item["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 100}
            items.append(item)
        return items

    def _send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        wanted = request.headers["range"]
        self.requests.append((name, wanted))
        fault = self.faults[name].pop(0) if self.faults.get(name) else Fault()
        data = self.files[name] if fault.body is None else fault.body
        if fault.status is not None:
            self._refuse(request, Refusal(fault.status))
            return
        start = 0
        if wanted is not None and not fault.ignores_range:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self._refuse(request, Refusal(416))
                return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("content-length", str(len(data) - start))
        request.end_headers()
        rest = data[start:]
        request.wfile.write(rest if fault.cut_at is None else rest[: fault.cut_at])
        if fault.hold is not None:
            fault.hold.wait(60)
        if fault.is_reset:
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()

    def _refuse(self, request: BaseHTTPRequestHandler, refusal: Refusal) -> None:
        headers = {} if refusal.code is None else {"x-error-code": refusal.code}
        self._send(request, refusal.status, headers, b"")

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str], body: bytes
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
