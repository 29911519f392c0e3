"""Where the server stands, and what `/health` says about it.

LOADING -> READY -> DRAINING          a failure of loading or of a step leads to FAILED from anywhere
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from glm53srv.api.served import ServedModel
from glm53srv.errors import NotReady, RequestFailed
from glm53srv.scheduler.loop import StepLoop

LOADING_RETRY_S = 5
DRAINING_RETRY_S = 10


class Phase(enum.Enum):
    """See the table at the head of this file; the values are what /health shows."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Loading(NotReady):
    """The model is still loading."""

    code = "loading"


class ShuttingDown(NotReady):
    """The server takes no more requests."""

    code = "shutting_down"


@dataclass(frozen=True, slots=True)
class Running:
    """What requests need once the model is there."""

    model: ServedModel
    steps: StepLoop


class ServerState:
    """Owned by the event loop thread. `report` alone may be called from the loading thread."""

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.running: Running | None = None
        self.reason: str | None = None
        self._progress = (0.0, "starting")

    def report(self, fraction: float, stage: str) -> None:
        """Note the progress of loading: one assignment of a pair, so that readers see both or neither."""
        self._progress = (fraction, stage)

    def set_ready(self, running: Running) -> None:
        """Loading has ended well; during a drain that changes nothing."""
        self.running = running
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def set_failed(self, reason: str) -> None:
        """Loading or a step has failed; there is no way back."""
        self.phase = Phase.FAILED
        self.reason = reason

    def set_draining(self) -> None:
        """Take no more requests."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def require_running(self) -> Running:
        """Give what requests need. Raises NotReady or RequestFailed."""
        if self.phase is Phase.READY and self.running is not None:
            return self.running
        if self.phase is Phase.LOADING:
            fraction, stage = self._progress
            raise Loading(
                f"Loading model, {fraction:.0%} ({stage})", retry_after_s=LOADING_RETRY_S, param=None
            )
        if self.phase is Phase.DRAINING:
            raise ShuttingDown("Server is shutting down", retry_after_s=DRAINING_RETRY_S)
        raise RequestFailed(f"The server has failed and must be restarted: {self.reason}")

    def health(self) -> tuple[int, dict[str, Any], int | None]:
        """Give status code, body and Retry-After seconds of /health."""
        fraction, stage = self._progress
        match self.phase:
            case Phase.READY:
                body: dict[str, Any] = {"status": "ready"}
                if self.running is not None:
                    body["model"] = self.running.model.name
                return 200, body, None
            case Phase.LOADING:
                progress = {"status": "loading", "progress": round(fraction, 4), "stage": stage}
                return 503, progress, LOADING_RETRY_S
            case Phase.DRAINING:
                return 503, {"status": "draining"}, DRAINING_RETRY_S
            case Phase.FAILED:
                return 500, {"status": "failed", "reason": self.reason}, None
