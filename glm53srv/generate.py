"""One prompt in the terminal: the server's own path without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

from glm53srv.api.chat_template import ChatMessage, TemplateOptions, render_chat
from glm53srv.api.generations import Generations, open_generations
from glm53srv.api.lifecycle import Lifecycle
from glm53srv.api.loading import checkpoint_loader, scheduler_settings
from glm53srv.api.output_events import ContentDelta, ReasoningDelta
from glm53srv.api.output_parser import OutputParser
from glm53srv.api.served import ServedModel
from glm53srv.api.service import GenerationJob
from glm53srv.config import Config
from glm53srv.errors import ConfigError
from glm53srv.flags import take_flags
from glm53srv.progress import ProgressLine
from glm53srv.request import GenerationRequest, SamplingParams

FLAGS = {
    "--system": "a system prompt",
    "--max-tokens": "a whole number",
    "--temperature": "a number",
    "--seed": "a whole number",
    "--effort": "low, high or max",
}
SWITCHES = ("--no-thinking",)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What `glm53srv generate` takes besides the configuration. None: the checkpoint's default."""

    prompt: str
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> tuple[GenerateOptions, list[str]]:
        """Take the prompt and this command's flags off; gives what is left. Raises ConfigError."""
        words, flags = take_flags(argv, FLAGS, SWITCHES)
        if not words or words[0].startswith("-"):
            raise ConfigError('generate needs a prompt first: glm53srv generate "Hello" --model DIR')
        try:
            options = cls(
                prompt=words[0],
                system=flags.get("--system"),
                max_tokens=int(flags["--max-tokens"]) if "--max-tokens" in flags else None,
                temperature=float(flags["--temperature"]) if "--temperature" in flags else None,
                seed=int(flags["--seed"]) if "--seed" in flags else None,
                template=TemplateOptions(
                    reasoning_effort=flags.get("--effort"), enable_thinking="--no-thinking" not in flags
                ),
            )
        except ValueError as error:
            raise ConfigError(f"a flag of generate has a value that is not a number: {error}") from error
        return options, words[1:]


async def generate(config: Config, options: GenerateOptions, out: TextIO, terminal: TextIO) -> int:
    """Load, answer one prompt on `out` as it comes, show speed on `terminal`; returns the exit code.

    Raises Glm53Error: what loading, the request or the engine failed with.
    """
    lifecycle = Lifecycle(
        checkpoint_loader(config), scheduler_settings(config), report=ProgressLine(terminal)
    )
    lifecycle.start()
    try:
        await lifecycle.wait_settled()
        if lifecycle.failure is not None:
            raise lifecycle.failure
        running = lifecycle.state.require_running()
        if running.model.caveat is not None:
            terminal.write(f"Note: {running.model.caveat}.\n")
        begin_s = time.monotonic()
        generations = open_generations(running.steps, [_job(options, running.model)], running.model.tokenizer)
        try:
            await _print(generations, out)
        finally:
            generations.close()
        _print_speed(generations, begin_s, terminal)
    finally:
        await lifecycle.aclose()
    return 0


def _job(options: GenerateOptions, model: ServedModel) -> GenerationJob:
    messages = [ChatMessage("user", options.prompt)]
    if options.system is not None:
        messages.insert(0, ChatMessage("system", options.system))
    prompt = render_chat(messages, options=options.template)
    request = GenerationRequest(
        request_id="generate",
        prompt_ids=model.tokenizer.encode(prompt.segments),
        sampling=_sampling(options, model.defaults),
        max_tokens=options.max_tokens,
    )

    def new_reader() -> OutputParser:
        return OutputParser({}, starts_in_reasoning=prompt.ends_in_reasoning, reads_calls=False)

    return GenerationJob(request, new_reader)


def _sampling(options: GenerateOptions, defaults: SamplingParams) -> SamplingParams:
    sampling = replace(defaults, seed=options.seed)
    return sampling if options.temperature is None else replace(sampling, temperature=options.temperature)


async def _print(generations: Generations, out: TextIO) -> None:
    """Write text as it comes; reasoning is set apart by an empty line after it."""
    was_reasoning = False
    while outputs := await generations.next_steps():
        for event in outputs[0].events:
            if isinstance(event, ReasoningDelta | ContentDelta):
                is_reasoning = isinstance(event, ReasoningDelta)
                out.write(("\n\n" if was_reasoning and not is_reasoning else "") + event.text)
                was_reasoning = is_reasoning
        out.flush()
        await asyncio.sleep(0)
    out.write("\n")


def _print_speed(generations: Generations, begin_s: float, terminal: TextIO) -> None:
    usage = generations.usage
    first_s = (generations.first_token_s or begin_s) - begin_s
    rest_s = max(time.monotonic() - begin_s - first_s, 1e-9)
    terminal.write(
        f"{usage.prompt_tokens} prompt tokens, first token after {first_s:.2f} s, "
        f"{usage.completion_tokens} tokens, {(usage.completion_tokens - 1) / rest_s:.1f} tokens/s\n"
    )
