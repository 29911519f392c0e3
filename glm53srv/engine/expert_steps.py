"""What an engine tells whoever keeps the routed experts: where a chunk and a decode step begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from glm53srv.offload.report import OffloadReport


class ExpertSteps(Protocol):
    """Brackets around the layers of the model. Called by the engine thread.

    A chunk's begin and end surround its layers, between which decode steps may come; chunks do not nest, and
    decode steps do not either.
    """

    def begin_chunk(self, num_tokens: int) -> None:
        """Begin the layers of a prefill chunk."""

    def end_chunk(self, is_more_waiting: bool) -> None:
        """End a chunk, done or dropped. is_more_waiting: its sequence's next chunk follows.

        Without a chunk it only takes the promise back that one would follow.
        """

    def begin_decode(self, num_rows: int) -> None:
        """Begin a decode step of some rows."""

    def end_decode(self) -> None:
        """End it. Raises EngineError if it failed on the way."""

    def close(self) -> None:
        """Free everything. Idempotent."""

    @property
    def report(self) -> OffloadReport | None:
        """What happened so far, or None where there is nothing to tell. May be read by any thread."""


class ExpertsInPlace:
    """Experts that are read where they lie: nothing to do."""

    def begin_chunk(self, num_tokens: int) -> None:
        """Do nothing."""

    def end_chunk(self, is_more_waiting: bool) -> None:
        """Do nothing."""

    def begin_decode(self, num_rows: int) -> None:
        """Do nothing."""

    def end_decode(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    @property
    def report(self) -> None:
        """Nothing to tell."""
        return None
