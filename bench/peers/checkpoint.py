"""Write the model that `glm53srv bench-model` draws to disk, so that other engines can load the same weights.

    python -m bench.peers.checkpoint DIR --layers 15

DIR gets config.json at the published model's dimensions, cut to its first layers (15 by default, fewer where
the disk is too small: 37 GB; each sparse layer more takes 2.8 GB), and files of weights. It must be empty or
not exist. The numbers depend on where they are drawn: on a GPU, where there is one, as bench-model's are.

Exit codes: 0 written, 2 not, with one line that says why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput, BenchError
from bench.peers.shards import Shard, ShardFile, plan_shards
from glm53srv.engine.cuda.synthetic_plan import require_host_memory
from glm53srv.errors import Glm53Error
from glm53srv.machine import GIB, MachineFacts, read_machine
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.model.published import PUBLISHED
from glm53srv.model.published_files import FEWEST_LAYERS, published_model, write_published_files
from glm53srv.model.safetensors_file import TensorInfo
from glm53srv.offload.device.layout import Part, expert_needs, sparse_layers

DEFAULT_LAYERS = 15
"""A third of the model. More layers cost minutes and change nothing but the size of the numbers."""
SPARE_DISK_BYTES = 2 * GIB
WRITERS = 12
MARKER = "drawn.json"


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a finished directory holds; written last. device: cpu or cuda, whose numbers differ."""

    layers: int
    seed: int
    device: str
    num_bytes: int


def read_marker(model_dir: Path) -> Drawn | None:
    """Tell what a directory holds, None for anything that this command did not finish."""
    try:
        return Drawn(**json.loads((model_dir / MARKER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def disk_bytes(shards: Sequence[Shard]) -> int:
    """Give the bytes that the files of weights take."""
    return sum(shard.num_bytes for shard in shards)


def choose_layers(free_bytes: int, wanted: int | None) -> int:
    """Give how many layers to write: those wanted, or DEFAULT_LAYERS, fewer if free_bytes hold fewer.

    Raises BadInput if the disk has no room for those wanted, or for the fewest there can be; ConfigError for
    a number of layers that is not there.
    """
    room = free_bytes - SPARE_DISK_BYTES
    if wanted is not None:
        need = disk_bytes(plan_shards(published_model(wanted)))
        if need <= room:
            return wanted
        fitting = next((n for n in range(wanted - 1, FEWEST_LAYERS - 1, -1) if _fits(n, room)), None)
        remedy = "free some" if fitting is None else f"--layers {fitting} fits"
        raise BadInput(
            f"{wanted} layers take {need / 1e9:.1f} GB of disk, {free_bytes / 1e9:.1f} are free, of which "
            f"{SPARE_DISK_BYTES / 1e9:.1f} stay so: {remedy}, or name another directory"
        )
    for layers in range(DEFAULT_LAYERS, FEWEST_LAYERS - 1, -1):
        if _fits(layers, room):
            return layers
    raise BadInput(
        f"even {FEWEST_LAYERS} layers do not fit on the disk, of which {free_bytes / 1e9:.1f} GB are free: "
        "free some, or name another directory"
    )


def _fits(layers: int, room: int) -> bool:
    return disk_bytes(plan_shards(published_model(layers))) <= room


def free_disk_bytes(directory: Path) -> int:
    """Give the free bytes of the disk on which a directory lies, or would lie."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


class Source:
    """The numbers of every tensor: routed experts from an arena, all else drawn. Any thread may ask."""

    def __init__(self, config: ModelConfig, device: str, num_threads: int) -> None:
        """Draw the experts. Raises MachineError if host memory does not hold them."""
        import torch

        from glm53srv.engine.cuda.synthetic import SyntheticTensors, fill_arena
        from glm53srv.offload.device.arena import ArenaOptions

        self._torch = torch
        self._arena = fill_arena(config, ArenaOptions(), num_threads)
        self._tensors = SyntheticTensors(config, self._arena, torch.device(device))
        self._trellis = {
            f"{need.key}.trellis": (layer, expert, part)
            for layer in range(len(sparse_layers(config)))
            for expert in range(config.moe.num_experts)
            for part, need in zip(Part, expert_needs(config, layer, expert), strict=True)
        }

    def data(self, name: str) -> NDArray[np.uint8]:
        """Give a tensor as it is stored: uint8, contiguous."""
        key = self._trellis.get(name)
        if key is not None:
            return self._arena.trellis(*key).reshape(-1).view(np.uint8)
        tensor: Any = self._tensors.get_tensor(name, allow_bf16=True)
        data: NDArray[np.uint8] = tensor.reshape(-1).view(self._torch.uint8).cpu().numpy()
        return data

    def close(self) -> None:
        """Let go of the experts."""
        self._arena.close()


def write_weights(target: Path, shards: Sequence[Shard], source: Source, num_threads: int = WRITERS) -> None:
    """Write all files. Raises OSError."""
    files = [ShardFile(target, shard) for shard in shards]
    pieces = [_expert_pieces(file, shard) for file, shard in zip(files, shards, strict=True)]
    # The files take turns: a file system lets one thread at a time write to a file.
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pieces))
    pool = ThreadPoolExecutor(num_threads)
    try:
        tasks = [pool.submit(_write_piece, piece, source) for piece in turns if piece is not None]
        tasks += [
            pool.submit(file.write, place, source.data(place.name))  # drawn by this thread, one by one
            for file, shard in zip(files, shards, strict=True)
            for place in itertools.filterfalse(_is_routed, shard.places)
        ]
        for task in tasks:
            task.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for file in files:
            file.close()


def _is_routed(place: TensorInfo) -> bool:
    return ".mlp.experts." in place.name


def _expert_pieces(file: ShardFile, shard: Shard) -> list[tuple[ShardFile, list[TensorInfo]]]:
    """Cut a file's routed experts into pieces of about four: by name, the tensors of each lie together."""
    routed = sorted(filter(_is_routed, shard.places), key=lambda place: place.name)
    return [(file, routed[begin : begin + 48]) for begin in range(0, len(routed), 48)]


def _write_piece(piece: tuple[ShardFile, list[TensorInfo]], source: Source) -> None:
    file, places = piece
    for place in places:
        file.write(place, source.data(place.name))


def write_tokenizer(target: Path, vocab_size: int) -> None:
    """Write a tokenizer.json of as many words as there are ids: readers of a checkpoint want one."""
    vocab = {f"<{number}>": number for number in range(vocab_size)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<0>"},
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def write_model(target: Path, shards: Sequence[Shard], device: str, num_threads: int = WRITERS) -> None:
    """Draw and write the weights and the tokenizer of the model whose config.json is in target.

    Raises MachineError for memory, OSError for the disk.
    """
    config = load_model_config(target)
    source = Source(config, device, num_threads)
    try:
        write_weights(target, shards, source, num_threads)
    finally:
        source.close()
    write_tokenizer(target, config.vocab_size)
    drawn = Drawn(config.num_layers, 0, device, disk_bytes(shards))
    (target / MARKER).write_text(json.dumps(asdict(drawn)) + "\n", encoding="utf-8")


def write_checkpoint(
    target: Path, wanted_layers: int | None, device: str, machine: MachineFacts, free_bytes: int
) -> Drawn:
    """Write a checkpoint at the published dimensions; one that is there already is left as it is.

    Raises BadInput for a directory that holds something else and for a disk that is too small, ConfigError
    for a number of layers that is not there, MachineError for memory, OSError for the disk. What was written
    before an error stays.
    """
    found = read_marker(target)
    if found is not None:
        if wanted_layers not in (None, found.layers) or device != found.device:
            raise BadInput(
                f"{target}: holds {found.layers} layers drawn on {found.device}; delete it, or name another"
            )
        return found
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target}: is not empty; name another directory")
    layers = choose_layers(free_bytes, wanted_layers)
    config = published_model(layers)
    require_host_memory(config, machine)
    target.mkdir(parents=True, exist_ok=True)
    write_published_files(target, layers)
    (target / "model.safetensors").unlink()  # the one without a tensor, in whose place come the shards
    write_model(target, plan_shards(config), device)
    written = read_marker(target)
    assert written is not None
    return written


def choose_device(text: str) -> str:
    """Resolve "auto". Raises BenchError without torch, BadInput for cuda where there is none."""
    try:
        import torch
    except ImportError as error:
        raise BenchError(f"drawing weights takes torch ({error}): pip install 'glm53srv[cuda]'") from error
    has_cuda = bool(torch.cuda.is_available())
    if text == "cuda" and not has_cuda:
        raise BadInput("--device cuda: torch finds no CUDA device; check the driver with nvidia-smi")
    return ("cuda" if has_cuda else "cpu") if text == "auto" else text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.peers.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help=f"the first N of {PUBLISHED.num_layers}")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to draw")
    given = parser.parse_args(argv)
    begin = time.perf_counter()
    try:
        device, free = choose_device(given.device), free_disk_bytes(given.directory)
        drawn = write_checkpoint(given.directory, given.layers, device, read_machine(), free)
    except (BenchError, Glm53Error, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    elapsed = time.perf_counter() - begin
    sys.stdout.write(
        f"{given.directory}: {drawn.layers} layers, {drawn.num_bytes / 1e9:.1f} GB drawn on {drawn.device}, "
        f"in {elapsed:.1f} s\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
