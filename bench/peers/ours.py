"""Measure our engine on a checkpoint, within a share of the card, as bench.peers.stock measures its own.

    python -m bench.peers.ours DIR --mode fast --vram 24 --out fast.json
    python -m bench.peers.ours --synthetic --layers 15 --mode exact

The cache of experts is as large as the whole model's would be, 42 layers of --experts each (by default what
the server's plan gives them while the KV cache is nearly empty, as it is here); decode may use --experts for
each layer that is there, prompts borrow from all. Guesses for look-ahead are as good as published ones.
--synthetic draws the weights in memory: the same numbers as on disk, without the disk.

Exit codes: 0 measured, 2 could not be measured, with one line that says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.errors import BadInput, BenchError
from bench.peers.holding import holding_slots
from bench.peers.options import CHUNK_TOKENS, MAX_STREAMS, PeerOptions, add_options, read_options
from bench.peers.peer_command import Say, run_peer
from bench.peers.stock import memory_facts
from bench.peers.traces import draw_traces, whole_routes
from glm53srv.bench_model.driver import Routes
from glm53srv.bench_model.guesses import guess_routes
from glm53srv.errors import Glm53Error, MachineError
from glm53srv.machine import MachineFacts, read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.model.published import PUBLISHED
from glm53srv.model.published_files import published_model
from glm53srv.model.tensor_needs import all_needs
from glm53srv.offload.cost import Mode
from glm53srv.offload.device.cpus import AUTO, choose_cpus
from glm53srv.offload.device.layout import sparse_layers

if TYPE_CHECKING:  # torch
    from glm53srv.engine.cuda.engine import CudaEngine
    from glm53srv.engine.cuda.loading import CudaOptions, LoadedModel

READERS = 12
"""Threads that read the checkpoint, which was just written: memory's speed, not a disk's."""


@dataclass(frozen=True, slots=True)
class OurSetup:
    """layers: of weights that are drawn, None for all."""

    mode: Mode
    layers: int | None


class OurPeer:
    """Our engine, open and warm. num_slots: the share of decode."""

    def __init__(
        self, engine: CudaEngine, config: ModelConfig, routes: Routes | None, num_slots: int
    ) -> None:
        self._engine = engine
        self._config = config
        self._routes = routes
        self._num_slots = num_slots

    @property
    def engine(self) -> CudaEngine:
        """The engine."""
        return self._engine

    @property
    def routes(self) -> Routes | None:
        """The traces."""
        return self._routes

    def holding(self) -> AbstractContextManager[None]:
        """Withhold the slots beyond the share."""
        return holding_slots(self._engine.offload.policy, self._num_slots)

    def counts(self) -> Mapping[str, int]:
        """Give the offload's counters."""
        return asdict(self._engine.offload.counts)

    def facts(self) -> dict[str, Any]:
        """Check some slots, and give the set-up and the memory at most.

        Raises EngineError for a slot that differs from its home.
        """
        offload = self._engine.offload
        facts = {
            "layers": self._config.num_layers,
            "decode_slots": min(self._num_slots, offload.plan.num_slots),
            "slots": offload.plan.num_slots,
            "chunk_tokens": self._engine.limits.max_chunk_tokens,
            "calibration": asdict(offload.calibration),
            "checked_slots": self._engine.check_slots(64, seed=9),
        }
        if offload.lane is not None:
            crew = offload.lane.stats()
            facts["crew"] = asdict(crew) | {"ms_per_expert": crew.ms_per_expert}
        return facts | memory_facts()

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


def cache_slots(gpu_experts: int) -> int:
    """Give the slots of the whole model's cache: as many experts as stock's split keeps on the card."""
    return gpu_experts * len(sparse_layers(PUBLISHED))


def open_ours(options: PeerOptions, setup: OurSetup, machine: MachineFacts, say: Say) -> OurPeer:
    """Load the engine and warm it up. Raises BenchError, CheckpointError, ConfigError, MachineError."""
    try:
        from glm53srv.engine.cuda.engine import CudaEngine
    except ImportError as error:
        raise MachineError(f"cannot import what the GPU needs ({error})") from error
    from glm53srv.engine.cuda.imposed_routes import ImposedRoutes
    from glm53srv.engine.sampler import SamplerBank

    cuda = _cuda_options(options, setup.mode, machine)
    loaded = _load(options.model_dir, setup.layers, cuda, machine)
    say("loaded")
    config = loaded.config
    try:
        routes = None
        if options.routes == "published":
            traces = draw_traces(config, whole_routes(config), MAX_STREAMS)
            experts = config.moe.num_experts
            guesses = [
                guess_routes(trace.astype(np.uint16), seed=stream, num_experts=experts)
                for stream, trace in enumerate(traces)
            ]
            routes = ImposedRoutes(traces, MAX_STREAMS, loaded.device, guesses)
            routes.impose(loaded.layers)
        engine = CudaEngine.open(loaded, SamplerBank(config.vocab_size, config.eos_token_ids), cuda)
    except BaseException:
        loaded.arena.close()
        raise
    if routes is not None:
        engine.offload.look_ahead.impose(routes.guesses_of_step)
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    num_slots = options.our_experts * len(sparse_layers(config))
    say(f"{num_slots} of {engine.offload.plan.num_slots} slots for decode")
    return OurPeer(engine, config, routes, num_slots)


def _cuda_options(options: PeerOptions, mode: Mode, machine: MachineFacts) -> CudaOptions:
    from glm53srv.engine.cuda.loading import CudaOptions
    from glm53srv.offload.device.options import OffloadOptions
    from glm53srv.offload.vram_plan import VramOptions

    return CudaOptions(
        OffloadOptions(
            mode=mode,
            vram=VramOptions(max_slots=cache_slots(options.our_experts)),
            crew_threads=0 if mode == "exact" else options.threads,
            crew_cpus=choose_cpus(AUTO, machine),
        ),
        max_streams=MAX_STREAMS,
        cache_tokens=options.cache_tokens,
        max_chunk_tokens=CHUNK_TOKENS,
        vram_bytes=options.vram_bytes,
    )


def _load(
    model_dir: Path | None, layers: int | None, cuda: CudaOptions, machine: MachineFacts
) -> LoadedModel:
    """Load a checkpoint as CudaEngine.load does, or draw the weights; not opened, since routes come first."""
    from glm53srv.engine.cuda.loading import limit_vram, load_model
    from glm53srv.engine.cuda.package import open_package
    from glm53srv.engine.cuda.synthetic_model import load_synthetic
    from glm53srv.engine.cuda.synthetic_plan import require_host_memory
    from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
    from glm53srv.offload.device.gpu.registered import RegisteredMemory

    if model_dir is None:
        require_host_memory(published_model(layers), machine)
        package = open_package(cuda.mode)
        limit_vram(cuda)
        with tempfile.TemporaryDirectory() as work_dir:
            return load_synthetic(package, cuda, Path(work_dir), layers, lambda part, stage: None)
    config, checkpoint = load_model_config(model_dir), Checkpoint(model_dir)
    checkpoint.check(all_needs(config))
    package = open_package(cuda.mode)
    limit_vram(cuda)
    pinned = ArenaOptions(num_readers=READERS, pinning=RegisteredMemory(package.extension))
    arena = ExpertArena.load(checkpoint, config, machine, pinned)
    try:
        return load_model(package, model_dir, config, arena, cuda, lambda part: None)
    except BaseException:
        arena.close()
        raise


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; its help is that of the command."""
    parser = argparse.ArgumentParser(
        prog="bench.peers.ours", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="?")
    parser.add_argument("--synthetic", action="store_true", help="draw the weights in memory")
    parser.add_argument("--layers", type=int, help="with --synthetic: the first N")
    parser.add_argument("--mode", choices=("exact", "fast"), default="fast")
    add_options(parser)
    return parser


def check_source(model_dir: Path | None, is_synthetic: bool, layers: int | None) -> None:
    """Raise BadInput unless exactly one source of weights is named."""
    if (model_dir is None) != is_synthetic:
        raise BadInput("name a checkpoint or --synthetic, one of the two")
    if layers is not None and not is_synthetic:
        raise BadInput("--layers goes with --synthetic: a checkpoint has the layers it has")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    given = make_parser().parse_args(argv)
    machine = read_machine()
    try:
        check_source(given.model_dir, given.synthetic, given.layers)
        options = read_options(given, machine)
    except (BenchError, Glm53Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    setup = OurSetup(given.mode, given.layers)
    return run_peer(f"ours {given.mode}", options, lambda each, say: open_ours(each, setup, machine, say))


if __name__ == "__main__":
    raise SystemExit(main())
