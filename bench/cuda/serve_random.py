"""Serve the CUDA engine at the published model's dimensions on random weights, over HTTP.

    python -m bench.cuda.serve_random --tokenizer reference/demo/checkpoint --port 30000 --mode fast

For what needs a whole server on a GPU and no download: evenness of streams, hours of load. Takes
--tokenizer, a directory with tokenizer.json, config.json and chat template, whose ids are the ones that are
drawn; --port; and the options of `glm53srv bench-model` that build an engine (those that say what is measured
do nothing). With --routes published, the default, each stream's decode steps follow a trace of experts, as
there; prompts follow the random routers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput
from glm53srv.api.lifecycle import Loaded, Loader
from glm53srv.api.loading import RANDOM_NAME, grammar_compiler, served_model
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.bench_model.driver import Routes
from glm53srv.bench_model.options import BenchOptions, parse_options
from glm53srv.config import Config, load_config
from glm53srv.engine.base import Engine, EngineLimits, StepPlan, StepResult
from glm53srv.errors import Glm53Error
from glm53srv.machine import read_machine
from glm53srv.offload.report import OffloadReport
from glm53srv.progress import Progress
from glm53srv.scheduler.admission import context_tokens
from glm53srv.server import serve

if TYPE_CHECKING:
    from glm53srv.engine.sampler import SamplerBank
    from glm53srv.model.config import ModelConfig

logger = logging.getLogger("serve_random")


class RoutedEngine:
    """An engine that is warm already, told before each decode step which experts it picks.

    limits: the engine's, with vocabulary and end ids of a tokenizer: who draws prompts draws from those.
    """

    def __init__(
        self, engine: Engine, limits: EngineLimits, routes: Routes | None, behind: Callable[[], None]
    ) -> None:
        """behind: called when a step is done."""
        self._engine = engine
        self.limits = limits
        self._routes = routes
        self._behind = behind

    @property
    def offload_report(self) -> OffloadReport | None:
        return self._engine.offload_report

    def warm_up(self) -> None:
        """Do nothing: loading did."""

    def step(self, plan: StepPlan) -> StepResult:
        """Execute one step. Raises EngineError, as the engine does."""
        if plan.decode and self._routes is not None:
            self._routes.send([row.slot for row in plan.decode])
        result = self._engine.step(plan)
        self._behind()
        return result

    def close(self) -> None:
        self._engine.close()


Build = Callable[[Callable[["ModelConfig"], "SamplerBank"]], tuple[Engine, Routes | None, Callable[[], None]]]
"""Loads and warms up the drawn model, given what makes its sampler: engine, routes, what follows a step."""


def random_loader(config: Config, build: Build) -> Loader:
    """Give the function that loads tokenizer and engine. config: of the server, its model is the tokenizer's.

    It raises CheckpointError for a tokenizer that is none, and what build raises.
    """

    def load(progress: Progress) -> Loaded:
        from glm53srv.engine.sampler import SamplerBank
        from glm53srv.model.config import load_model_config

        model_dir = config.engine.model_dir
        progress(0.0, "tokenizer")
        described = replace(load_model_config(model_dir), is_random=True, is_demo=False)
        tokenizer = Tokenizer.load(model_dir)
        grammars = grammar_compiler(tokenizer, described.eos_token_ids)

        def make_sampler(drawn: ModelConfig) -> SamplerBank:
            num_ids = min(tokenizer.num_ids, drawn.vocab_size)
            return SamplerBank(drawn.vocab_size, described.eos_token_ids, num_ids, grammars)

        progress(0.05, "engine")
        engine, routes, behind = build(make_sampler)
        served = served_model(
            config, described, tokenizer, grammars, context_tokens(engine.limits), created=int(time.time())
        )
        limits = replace(
            engine.limits,
            vocab_size=min(tokenizer.num_ids, engine.limits.vocab_size),
            eos_token_ids=described.eos_token_ids,
        )
        return Loaded(RoutedEngine(engine, limits, routes, behind), replace(served, name=RANDOM_NAME))

    return load


def builder(options: BenchOptions, work_dir: Path) -> Build:
    """Give what builds the CUDA engine as `glm53srv bench-model` does."""

    def build(make_sampler: Any) -> Any:
        from glm53srv.bench_model.command import build_engine
        from glm53srv.engine.cuda.synthetic_plan import require_host_memory
        from glm53srv.model.published_files import published_model

        machine = read_machine()
        require_host_memory(published_model(options.layers), machine)
        say = logger.info
        engine, model, _, routes = build_engine(options, machine, work_dir, say, make_sampler)
        return engine, routes, model.enqueue_s.clear

    return build


def read_command_line(argv: Sequence[str]) -> tuple[Config, BenchOptions]:
    """Give the server's configuration and the engine's. Raises BadInput or ConfigError."""
    parser = argparse.ArgumentParser(
        prog="bench.cuda.serve_random",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of tokenizer and template")
    parser.add_argument("--port", default="30000")
    given, rest = parser.parse_known_args(argv)
    options = parse_options(rest)
    if not given.tokenizer.is_dir():
        raise BadInput(f"--tokenizer {given.tokenizer}: no such directory")
    words = ["--model", str(given.tokenizer), "--port", given.port, "--mode", options.mode]
    return load_config(words), options


def main(argv: Sequence[str]) -> int:
    """Run the server; gives the exit code."""
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config, options = read_command_line(argv)
        with tempfile.TemporaryDirectory() as directory:
            load = random_loader(config, builder(options, Path(directory)))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve(config, sys.stderr, load))
    except (BadInput, Glm53Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
