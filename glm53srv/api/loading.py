"""From a configuration to what the API serves. Runs on the engine thread; shared by serve and generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glm53srv.api.lifecycle import Loaded, Loader
from glm53srv.api.served import ServedModel
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.config import Config
from glm53srv.machine import read_machine
from glm53srv.progress import Progress
from glm53srv.request import SamplingParams
from glm53srv.scheduler.admission import context_tokens
from glm53srv.scheduler.scheduler import SchedulerSettings

if TYPE_CHECKING:  # llguidance: not before the port is open
    from glm53srv.engine.grammar import GrammarCompiler
    from glm53srv.model.config import ModelConfig

DEFAULT_NAME = "glm-5.3-flash"
RANDOM_NAME = "random-weights"
DEMO_NAME = "glm53srv-demo"

MODEL_TYPE = "glm5_next"
"""model_type in the config.json of every checkpoint that is served."""

TOKENIZER_SHARE = 0.05
"""Share of the progress bar that ends before the engine loads."""


def checkpoint_loader(config: Config, *, wall_clock: Callable[[], float] = time.time) -> Loader:
    """Give the function that loads tokenizer, engine and model description. It raises Glm53Error."""

    def load(progress: Progress) -> Loaded:
        # numpy and native code: not before the port is open
        from glm53srv.engine.factory import load_engine
        from glm53srv.model.config import load_model_config
        from glm53srv.startup import summarise_running

        machine = read_machine()
        model_dir = config.engine.model_dir
        progress(0.0, "tokenizer")
        model_config = load_model_config(model_dir)
        tokenizer = Tokenizer.load(model_dir)
        progress(TOKENIZER_SHARE / 2, "grammars")
        grammars = grammar_compiler(tokenizer, model_config.eos_token_ids)
        rest = 1.0 - TOKENIZER_SHARE
        engine = load_engine(
            config.engine,
            machine,
            lambda part, stage: progress(TOKENIZER_SHARE + rest * part, stage),
            grammars,
        )
        num_context_tokens = context_tokens(engine.limits)
        served = served_model(
            config, model_config, tokenizer, grammars, num_context_tokens, created=int(wall_clock())
        )
        return Loaded(engine, served, summarise_running(config.engine, machine, engine))

    return load


def served_model(
    config: Config,
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    num_context_tokens: int,
    created: int,
) -> ServedModel:
    """Describe the model as the API shows it; what the checkpoint advises for sampling is the default."""
    from glm53srv.model.config import ARCHITECTURE

    advised = model_config.sampling
    neutral = SamplingParams()
    return ServedModel(
        name=config.server.served_name or _default_name(model_config),
        created=created,
        tokenizer=tokenizer,
        context_tokens=num_context_tokens,
        defaults=SamplingParams(
            temperature=_or(advised.temperature, neutral.temperature),
            top_p=_or(advised.top_p, neutral.top_p),
            top_k=int(_or(advised.top_k, neutral.top_k)),
            min_p=_or(advised.min_p, neutral.min_p),
            repetition_penalty=_or(advised.repetition_penalty, neutral.repetition_penalty),
        ),
        is_random=model_config.is_random,
        is_demo=model_config.is_demo,
        grammars=grammars,
        path=str(config.engine.model_dir),
        model_type=MODEL_TYPE,
        architectures=(ARCHITECTURE,),
    )


def grammar_compiler(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """Index the vocabulary for constrained output; about 1.5 s for GLM's."""
    from glm53srv.engine.grammar import GrammarCompiler

    token_bytes = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_ids)]
    return GrammarCompiler(token_bytes, sorted(tokenizer.control_ids), eos_token_ids, tokenizer.encode_text)


def scheduler_settings(config: Config) -> SchedulerSettings:
    """Give the scheduler's part of the configuration."""
    return SchedulerSettings(
        max_queue=config.scheduler.max_queue, token_interval_s=config.scheduler.target_gap_s
    )


def _default_name(config: ModelConfig) -> str:
    """The published model has one name wherever its files lie; nothing else should pass under it."""
    if config.is_random:
        return RANDOM_NAME
    return DEMO_NAME if config.is_demo else DEFAULT_NAME


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
