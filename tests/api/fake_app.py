"""An application for `hypercorn tests.api.fake_app:app`: unscripted, endless answers from the fake engine."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tests.api.harness import Server, make_server


class _FakeApp:
    def __init__(self) -> None:
        self._server: Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._server is None:
            self._server = make_server(
                handles_signals=True, drain_timeout_s=0.0, max_context_tokens=100_000, max_streams=1
            )
        await self._server.app(scope, receive, send)


app = _FakeApp()
