"""Measure stock exllamav3 1.5.1 with its CPU worker on a checkpoint, within a share of the card.

    python -m bench.peers.stock DIR --vram 24 --heat heat.json --out stock.json

Each sparse layer keeps as many experts on the card as fit beside the whole model's other weights and its
cache (--experts sets another number), the hottest by --heat, a file of `bench.peers.ours --heat-out`; without
one, those whose router's bias is largest. All settings of the package but the split and the number of
threads are its defaults.

Exit codes: 0 measured, 2 could not be measured, with one line that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput, BenchError
from bench.peers.heat import load_heat, router_heat, save_heat
from bench.peers.memory import peak_ram_gib
from bench.peers.options import CHUNK_TOKENS, MAX_STREAMS, PeerOptions, add_options, read_options
from bench.peers.peer_command import Say, run_peer
from glm53srv.errors import Glm53Error, MachineError
from glm53srv.machine import GIB, read_machine
from glm53srv.model.config import load_model_config

if TYPE_CHECKING:  # torch: the worker process imports this module anew and needs none of it
    from bench.peers.stock_engine import StockEngine


class StockPeer:
    """Stock exllamav3, open and warm. Its placement is static: nothing is to be held, and nothing counted."""

    def __init__(self, engine: StockEngine, facts: dict[str, Any]) -> None:
        self._engine = engine
        self._facts = facts

    @property
    def engine(self) -> StockEngine:
        """The engine."""
        return self._engine

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


def open_stock(options: PeerOptions, heat_path: Path | None, say: Say) -> StockPeer:
    """Load the package around the checkpoint and warm it up. Raises BenchError, CheckpointError,
    MachineError."""
    if options.model_dir is None:
        raise BadInput("stock exllamav3 needs a checkpoint")
    config = load_model_config(options.model_dir)
    heat = router_heat(config, options.model_dir) if heat_path is None else load_heat(heat_path, config)
    source = "routers' biases" if heat_path is None else "picks counted by our engine"
    experts = min(options.gpu_experts, config.moe.num_experts - 1)  # the split leaves one to the CPU at least
    say(f"{experts} of {config.moe.num_experts} experts a layer on the card, the hottest by the {source}")
    torch, stock_engine, limit_vram, options_class = _import_engine()
    if not torch.cuda.is_available():
        raise MachineError("torch finds no CUDA device; check the driver with nvidia-smi")
    limit_vram(options_class(vram_bytes=options.vram_bytes))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "heat.json"
        save_heat(path, heat)
        setup = stock_engine.StockSetup(
            model_dir=options.model_dir,
            config=config,
            cpu_experts=config.moe.num_experts - experts,
            heat_path=path,
            threads=options.threads,
            cache_tokens=options.cache_tokens,
            max_streams=MAX_STREAMS,
            chunk_tokens=CHUNK_TOKENS,
        )
        engine = stock_engine.StockEngine.load(setup)
    say("loaded")
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    facts = {
        "exllamav3": stock_engine.PACKAGE_VERSION,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "placed_by": source,
        "layers": config.num_layers,
        "gpu_experts": experts,
    }
    return StockPeer(engine, facts)


def _import_engine() -> Any:
    """Import what needs torch; gives torch, stock_engine and what limits the VRAM."""
    try:
        import torch

        from bench.peers import stock_engine
        from glm53srv.engine.cuda.loading import CudaOptions, limit_vram
    except ImportError as error:
        raise MachineError(f"cannot import what the GPU needs ({error})") from error
    return torch, stock_engine, limit_vram, CudaOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.peers.stock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--heat", type=Path, help="counts of experts, to place them by")
    add_options(parser)
    given = parser.parse_args(argv)
    try:
        options = read_options(given, read_machine())
    except (BenchError, Glm53Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return run_peer("stock", options, lambda each, say: open_stock(each, given.heat, say))


if __name__ == "__main__":  # the package's worker is spawned: it imports this module, and must not run it
    raise SystemExit(main())
