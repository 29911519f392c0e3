"""Who may call: API keys, as ASGI middleware."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from glm53srv.api import openai_wire
from glm53srv.api.asgi import error_headers, send_json
from glm53srv.errors import AuthenticationFailed

OPEN_PATHS = ("/health", "/livez")
"""Probes have no key; these paths, and those below the first, tell nothing that is worth one."""


class ApiKeyGate:
    """Lets requests through that give one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Every key is compared, each in constant time, so that the time tells neither which one matched nor how
    much of it. Keys never reach a log or an answer.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope["path"]) or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        error = AuthenticationFailed(
            "Incorrect or missing API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        )
        headers = [*error_headers(error), (b"www-authenticate", b"Bearer")]
        await send_json(send, error.status, openai_wire.error_body(error), headers)

    def _is_allowed(self, scope: Scope) -> bool:
        is_allowed = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            elif name == b"x-api-key":
                given = value
            else:
                continue
            for key in self._keys:
                is_allowed |= hmac.compare_digest(given.strip(), key)
        return is_allowed


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/health/")
