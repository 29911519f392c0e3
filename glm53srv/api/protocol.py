"""What every wire protocol brings to the one generation path.

    body -> prepare() -> jobs -> service.Generations -> StreamWriter or AnswerBuilder -> answer

A protocol is a module of pure translation: it knows no socket, no clock and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from glm53srv.api.constraints import OutputFormat
from glm53srv.api.served import ServedModel
from glm53srv.api.service import GenerationJob, StepOutput
from glm53srv.errors import RequestError
from glm53srv.request import Usage


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What names one answer. answer_id: with the protocol's prefix. created: Unix seconds."""

    answer_id: str
    created: int


class StreamWriter(Protocol):
    """Spells a stream: opening, steps, closing; or an error in place of what is left."""

    def opening(self, usage: Usage) -> bytes:
        """Give what goes out before the prompt is computed: never empty, so that proxies see life."""

    def step(self, output: StepOutput, usage: Usage) -> bytes:
        """Give the events of one step of one choice. usage: of the whole request so far."""

    def closing(self, usage: Usage) -> bytes:
        """Give what follows the last choice's finish."""

    def error(self, error: RequestError) -> bytes:
        """Give the last events of a stream that cannot go on."""


class AnswerBuilder(Protocol):
    """Assembles the answer of a request that does not stream; equal to its stream put together."""

    def add(self, output: StepOutput) -> None:
        """Take one step of one choice."""

    def body(self, usage: Usage) -> object:
        """Give the answer as JSON values, once every choice has finished."""


class PreparedRequest(Protocol):
    """A checked request with encoded prompts."""

    @property
    def jobs(self) -> Sequence[GenerationJob]: ...

    @property
    def is_stream(self) -> bool: ...

    @property
    def output_formats(self) -> Sequence[OutputFormat]:
        """The constraints of its jobs, still to be compiled, with the fields that asked for them."""

    @property
    def ignored(self) -> Sequence[str]:
        """Template arguments that nobody reads, for the log."""

    def new_writer(self, head: AnswerHead, model: ServedModel) -> StreamWriter:
        """Make the writer of its stream."""

    def new_builder(self, head: AnswerHead, model: ServedModel) -> AnswerBuilder:
        """Make the builder of its answer."""


Prepare = Callable[[bytes | bytearray, ServedModel, str], PreparedRequest]
"""Checks and encodes a body, given the request's id, in a thread if it is long. Raises RequestError."""
