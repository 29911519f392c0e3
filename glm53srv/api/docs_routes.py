"""/openapi.json and /docs, made once from the table of endpoints."""

from __future__ import annotations

import html
from collections.abc import Sequence

import orjson
from starlette.types import Receive, Scope, Send

from glm53srv import __version__
from glm53srv.api.info_routes import send_bytes
from glm53srv.api.openapi import Operation, openapi_document, openapi_path

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>glm53srv</title>
<style>
body {{ font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
td {{ padding: .2rem 1rem .2rem 0; }} code {{ white-space: nowrap; }}
</style>
<h1>glm53srv {version}</h1>
<p>Endpoints of this server. Fields and their types: <a href="openapi.json">openapi.json</a>.</p>
<table>
{rows}
</table>
</html>
"""

Operations = Sequence[tuple[str, str, Operation]]
"""Method, path in the router's spelling, operation."""


class OpenApi:
    """GET /openapi.json."""

    def __init__(self, operations: Operations) -> None:
        self._data = orjson.dumps(openapi_document(operations, __version__))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, b"application/json", self._data)


class DocsPage:
    """GET /docs: the endpoints as a page without scripts."""

    def __init__(self, operations: Operations) -> None:
        rows = "\n".join(
            f"<tr><td>{method}</td><td><code>{html.escape(openapi_path(path))}</code></td>"
            f"<td>{html.escape(operation.summary)}</td></tr>"
            for method, path, operation in operations
        )
        self._data = PAGE.format(version=html.escape(__version__), rows=rows).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, b"text/html; charset=utf-8", self._data)
