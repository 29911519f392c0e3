"""Measure stock exllamav3 1.5.1 with its CPU worker on a checkpoint, within a share of the card.

    python -m bench.peers.stock DIR --vram 24 --out stock.json

Each sparse layer keeps as many experts on the card as fit beside the whole model's other weights and its
cache (--experts sets another number): the most popular ones, by the model from which the traces of --routes
published are drawn, or with --routes own by the routers' biases. All settings of the package but the split,
its static placement and the number of threads are its defaults.

Exit codes: 0 measured, 2 could not be measured, with one line that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput, BenchError
from bench.peers.heat import module_key, placement, route_heat, router_heat
from bench.peers.memory import peak_ram_gib
from bench.peers.options import CHUNK_TOKENS, MAX_STREAMS, PeerOptions, add_options, read_options
from bench.peers.peer_command import Say, run_peer
from bench.peers.traces import draw_traces, renumber, whole_routes
from glm53srv.bench_model.driver import Routes
from glm53srv.errors import Glm53Error, MachineError
from glm53srv.machine import GIB, read_machine
from glm53srv.model.config import load_model_config
from glm53srv.offload.device.layout import sparse_layers

if TYPE_CHECKING:  # torch: the worker process imports this module anew and needs none of it
    from bench.peers.stock_engine import StockEngine


class StockPeer:
    """Stock exllamav3, open and warm. Its placement is static: nothing is to be held, and nothing counted."""

    def __init__(self, engine: StockEngine, routes: Routes | None, facts: dict[str, Any]) -> None:
        self._engine = engine
        self._routes = routes
        self._facts = facts

    @property
    def engine(self) -> StockEngine:
        """The engine."""
        return self._engine

    @property
    def routes(self) -> Routes | None:
        """The traces, by the places of experts in the package."""
        return self._routes

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def counts(self) -> Mapping[str, int]:
        """Give nothing."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Give the set-up and the memory at most."""
        return self._facts | memory_facts()

    def close(self) -> None:
        """Free the model and end its worker."""
        self._engine.close()


def memory_facts() -> dict[str, float]:
    """Give the most memory held so far: of this process and its children, and of torch on the card."""
    import torch

    return {
        "peak_ram_gib": peak_ram_gib(),
        "peak_vram_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def open_stock(options: PeerOptions, say: Say) -> StockPeer:
    """Load the package around the checkpoint and warm it up. Raises BenchError, CheckpointError,
    MachineError."""
    if options.model_dir is None:
        raise BadInput("stock exllamav3 needs a checkpoint")
    config = load_model_config(options.model_dir)
    drawn = whole_routes(config) if options.routes == "published" else None
    heat = router_heat(config, options.model_dir) if drawn is None else route_heat(config, drawn)
    experts = min(options.gpu_experts, config.moe.num_experts - 1)  # the split leaves one to the CPU at least
    say(f"{experts} of {config.moe.num_experts} experts a layer on the card, the most popular ones")
    gpu = import_gpu()
    package = gpu.import_package()
    gpu.limit_vram(gpu.CudaOptions(vram_bytes=options.vram_bytes))
    setup = gpu.StockSetup(
        model_dir=options.model_dir,
        config=config,
        cpu_experts=config.moe.num_experts - experts,
        heat=heat,
        threads=options.threads,
        cache_tokens=options.cache_tokens,
        max_streams=MAX_STREAMS,
        chunk_tokens=CHUNK_TOKENS,
    )
    engine = gpu.StockEngine.load(package, setup)
    say("loaded")
    try:
        routes = None
        if drawn is not None:
            orders = [placement(heat[module_key(layer)]) for layer in sparse_layers(config)]
            traces = [renumber(trace, orders) for trace in draw_traces(config, drawn, MAX_STREAMS)]
            routes = gpu.ImposedRoutes(traces, MAX_STREAMS, "cuda:0")
            routes.impose(engine.layers)
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    facts = {
        "exllamav3": gpu.PACKAGE_VERSION,
        "torch": gpu.torch.__version__,
        "device": gpu.torch.cuda.get_device_name(),
        "placed_by": "routers' biases" if drawn is None else "popularity in the traces' model",
        "layers": config.num_layers,
        "gpu_experts": experts,
    }
    return StockPeer(engine, routes, facts)


def import_gpu() -> Any:
    """Import what needs torch, as attributes of one object. Raises MachineError without it or a GPU."""
    try:
        import torch

        from bench.peers.stock_engine import PACKAGE_VERSION, StockEngine, StockSetup, import_package
        from glm53srv.engine.cuda.imposed_routes import ImposedRoutes
        from glm53srv.engine.cuda.loading import CudaOptions, limit_vram
    except ImportError as error:
        raise MachineError(f"cannot import what the GPU needs ({error})") from error
    if not torch.cuda.is_available():
        raise MachineError("torch finds no CUDA device; check the driver with nvidia-smi")
    return SimpleNamespace(
        torch=torch,
        PACKAGE_VERSION=PACKAGE_VERSION,
        StockEngine=StockEngine,
        StockSetup=StockSetup,
        import_package=import_package,
        ImposedRoutes=ImposedRoutes,
        CudaOptions=CudaOptions,
        limit_vram=limit_vram,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.peers.stock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    add_options(parser)
    given = parser.parse_args(argv)
    try:
        options = read_options(given, read_machine())
    except (BenchError, Glm53Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return run_peer("stock", options, open_stock)


if __name__ == "__main__":  # the package's worker is spawned: it imports this module, and must not run it
    raise SystemExit(main())
