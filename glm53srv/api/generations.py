"""All choices of all prompts of a request: submitted together, waited for within limits, closed together.

Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from glm53srv.api.service import RETRY_AFTER_S, Generation, GenerationJob, StepOutput, TokenSource
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.errors import QueueTimeout, RequestTimeout
from glm53srv.request import GenerationRequest, Usage


class StepSource(Protocol):
    """Whatever runs sequences (scheduler.loop.StepLoop)."""

    def submit(self, request: GenerationRequest) -> TokenSource:
        """Queue a request. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from the submission: until every choice has a slot; until all have ended. None: no limit."""

    queue_s: float | None = None
    total_s: float | None = None


@dataclass(slots=True)
class Generations:
    """All choices of all prompts of a request: choice = prompt * choices_per_prompt + choice of the prompt.

    Whoever opens it closes it in a `finally`. queue_end_s, total_end_s: deadlines on the event loop's clock,
    or None.
    """

    choices: list[Generation]
    submitted_s: float
    clock: Callable[[], float]
    choices_per_prompt: int = 1
    queue_end_s: float | None = None
    total_end_s: float | None = None
    first_token_s: float | None = None
    _waiting: dict[asyncio.Task[StepOutput], int] = field(default_factory=dict)

    @property
    def usage(self) -> Usage:
        """Each prompt once, outputs summed over the choices."""
        if len(self.choices) == 1:
            return self.choices[0].usage
        parts = [choice.usage for choice in self.choices]
        prompts = parts[:: self.choices_per_prompt]
        return Usage(
            prompt_tokens=sum(part.prompt_tokens for part in prompts),
            completion_tokens=sum(part.completion_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in prompts),
            reasoning_tokens=sum(part.reasoning_tokens for part in parts),
        )

    async def next_steps(self) -> list[StepOutput]:
        """Wait for the next outputs, at most one per choice; empty when all choices have finished.

        Raises what Generation.next_step raises, QueueTimeout, RequestTimeout.
        """
        outputs = await self._next_in_time()
        if self.first_token_s is None and any(output.usage.completion_tokens for output in outputs):
            self.first_token_s = self.clock()
        return outputs

    def close(self) -> None:
        """Abort what still runs. Idempotent, never waits."""
        for task in self._waiting:
            task.add_done_callback(_take_result)
            task.cancel()
        self._waiting.clear()
        for choice in self.choices:
            choice.close()

    async def _next_in_time(self) -> list[StepOutput]:
        if self.queue_end_s is not None and all(choice.is_scheduled for choice in self.choices):
            self.queue_end_s = None
        ends_s = [end_s for end_s in (self.queue_end_s, self.total_end_s) if end_s is not None]
        if not ends_s:  # the common case pays for no timer
            return await self._next()
        try:
            async with asyncio.timeout_at(min(ends_s)):
                return await self._next()
        except TimeoutError:
            if self.total_end_s == min(ends_s):
                raise RequestTimeout("The request took longer than this server allows") from None
        if all(choice.is_scheduled for choice in self.choices):  # all in their slots, before any token
            return await self._next_in_time()
        raise QueueTimeout("The request waited too long for a free slot", retry_after_s=RETRY_AFTER_S)

    async def _next(self) -> list[StepOutput]:
        if len(self.choices) == 1:
            only = self.choices[0]
            return [] if only.is_finished else [await only.next_step()]
        return await self._next_of_many()

    async def _next_of_many(self) -> list[StepOutput]:
        waited_for = set(self._waiting.values())
        for at, choice in enumerate(self.choices):
            if not choice.is_finished and at not in waited_for:
                self._waiting[asyncio.get_running_loop().create_task(choice.next_step())] = at
        if not self._waiting:
            return []
        done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._waiting[task]
            task.add_done_callback(_take_result)  # of several that fail, only the first is raised
        outputs = [task.result() for task in done]
        return sorted(outputs, key=lambda output: output.choice)


def open_generations(
    source: StepSource,
    jobs: Sequence[GenerationJob],
    tokenizer: Tokenizer,
    *,
    clock: Callable[[], float] = time.monotonic,
    deadlines: Deadlines = Deadlines(),
) -> Generations:
    """Submit all choices of all prompts, or none. Raises RequestError.

    jobs: one for each prompt, all with the same number of choices. clock: the one of the step loop.
    """
    opened: list[Generation] = []
    submitted_s = clock()
    try:
        for job in jobs:
            for request in job.requests:
                stream = source.submit(request)
                opened.append(Generation(len(opened), stream, job, tokenizer, clock))
    except BaseException:
        for generation in opened:
            generation.close()
        raise
    now_s = asyncio.get_running_loop().time()
    return Generations(
        opened,
        submitted_s,
        clock,
        jobs[0].num_choices,
        queue_end_s=None if deadlines.queue_s is None else now_s + deadlines.queue_s,
        total_end_s=None if deadlines.total_s is None else now_s + deadlines.total_s,
    )


def _take_result(task: asyncio.Task[StepOutput]) -> None:
    """Look at a result nobody waits for, so that asyncio does not report it as forgotten."""
    if not task.cancelled():
        task.exception()
