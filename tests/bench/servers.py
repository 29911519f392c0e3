"""Small HTTP servers in this process: some play a server under test, one stands between and lies."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Answer = tuple[int, bytes]
Respond = Callable[[str, str, bytes], Answer]
"""Answers (method, path, body) with a status and a body; one that begins with `data:` is a stream."""


@contextmanager
def serving(respond: Respond) -> Iterator[str]:
    """Serve on a free port; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, content = respond(method, self.path, body)
            kind = "text/event-stream" if content.startswith(b"data:") else "application/json"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def lying(url: str, path: str, change: Callable[[Any], Any]) -> Respond:
    """Pass everything on to url, but change the JSON that `path` answers with."""

    def respond(method: str, asked: str, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        try:
            connection.request(method, asked, body or None, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if asked == path and answer.status == 200:
            content = json.dumps(change(json.loads(content))).encode()
        return answer.status, content

    return respond


def answers(table: dict[str, Answer]) -> Respond:
    """Answer by path; 404 for any other."""
    missing = (404, b'{"error": {"message": "no such path"}}')
    return lambda method, path, body: table.get(path, missing)


def chat_stream(text: str, *, prompt_tokens: int = 10, cached_tokens: int = 0) -> bytes:
    """Give a chat stream that says a text word by word, with usage."""
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": word + " "}, "finish_reason": None}]} for word in text.split()
    ]
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(events),
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    events.append({"choices": [], "usage": usage})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return ("".join(lines) + "data: [DONE]\n\n").encode()
