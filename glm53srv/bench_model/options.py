"""What `glm53srv bench-model` takes; its own flags, since nothing of a server is configured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from glm53srv.bench_model.guesses import RECALL
from glm53srv.errors import ConfigError
from glm53srv.offload.cost import Mode
from glm53srv.offload.look_ahead import MAX_AHEAD, NUM_AHEAD
from glm53srv.offload.offers import NUM_OFFERS, RING_SLOTS

DESCRIPTION = """\
Measure the CUDA engine at the published model's dimensions on random weights, within a share of the card.

    glm53srv bench-model --mode exact --vram 24 --out result.json
    glm53srv bench-model --mode fast --layers 15 --soak 60

No file is read. --layers takes the first N of the model's 45, for hosts with less than about 110 GiB of RAM.
Each figure comes from engine steps, without HTTP. Prints a line per figure; --out keeps all as JSON."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One run. Sizes in tokens, vram_gib 0 for all of the card; None where the machine decides."""

    mode: Mode
    layers: int | None
    vram_gib: float
    cache_tokens: int
    chunk_tokens: int
    max_slots: int | None
    reserve_gib: float | None
    landing: int
    ahead: int
    guess_recall: float
    offers: int
    cpus: str
    threads: int | None
    streams: tuple[int, ...]
    warm_steps: int
    steps: int
    prefill_tokens: tuple[int, ...]
    beside_tokens: int
    beside_layers: int
    soak_s: float
    out: Path | None
    tuning_dir: Path | None
    graphs: bool
    ct_prefill: int
    routes: str
    ct_split: str
    whole_cache: bool
    chunk_slots: int | None


class _Parser(argparse.ArgumentParser):
    """argparse with this program's kind of error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"bench-model: {message}")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; its help is that of the command."""
    parser = _Parser(
        prog="glm53srv bench-model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    positive, count = _whole(1), _whole(0)
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--layers", type=positive, help="take the first N layers, from 4")
    parser.add_argument("--vram", type=_amount, default=24.0, help="GiB of the card to use; 0: all")
    parser.add_argument("--cache-tokens", type=positive, default=131072)
    parser.add_argument(
        "--whole-cache", action="store_true", help="give the KV cache all its memory from the start"
    )
    parser.add_argument("--chunk", type=positive, default=8192, help="tokens of a prefill chunk at most")
    parser.add_argument("--reserve", type=_amount, help="GiB that stay free, as --ec-reserve-gb of serve")
    parser.add_argument("--chunk-slots", type=positive, help="slots of one allocation; 32 by default")
    parser.add_argument("--max-slots", type=positive, help="experts in the cache at most")
    parser.add_argument(
        "--landing", type=count, default=16, help="buffers for experts of the link; 0: read in place"
    )
    parser.add_argument(
        "--ahead",
        type=_whole(0, MAX_AHEAD),
        default=NUM_AHEAD,
        help="experts of the next layer fetched beside attention, by a guess",
    )
    parser.add_argument(
        "--guess-recall",
        type=_share,
        default=RECALL,
        help="part of the picks that guesses name, with published routes; with own ones the routers guess",
    )
    parser.add_argument(
        "--offers",
        type=_whole(0, RING_SLOTS),
        default=NUM_OFFERS,
        help="slots offered to experts of the link; 0: admissions by copies alone",
    )
    parser.add_argument("--cpus", default="auto", help="CPUs of the expert workers, as --ct-cpus of serve")
    parser.add_argument("--threads", type=positive, help="expert workers; one per CPU by default")
    parser.add_argument("--streams", type=_whole(1, 4), nargs="*", default=[1, 2, 4])
    parser.add_argument("--warm", type=count, default=200, help="steps before timing")
    parser.add_argument(
        "--routes",
        choices=("published", "own"),
        default="published",
        help="who picks in decode steps: traces of the published skew and locality, or the random routers",
    )
    parser.add_argument("--steps", type=positive, default=64, help="steps that are timed")
    parser.add_argument("--prefill", type=positive, nargs="*", default=[8192, 32768], help="prompt lengths")
    parser.add_argument("--beside", type=count, default=0, help="tokens of a prompt beside a decoding stream")
    parser.add_argument("--beside-layers", type=positive, default=2, help="layers of it per step")
    parser.add_argument("--soak", type=_amount, default=0.0, help="seconds of mixed load")
    parser.add_argument("--tuning-dir", type=Path, help="as that of serve; by default nothing is kept")
    parser.add_argument(
        "--ct-prefill", type=count, default=0, help="as that of serve: the CPU helps chunks of so many tokens"
    )
    parser.add_argument("--ct-split", choices=("parts", "whole"), default="parts", help="as that of serve")
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel of a step from Python")
    parser.add_argument("--out", type=Path, help="file for all numbers as JSON")
    return parser


def parse_options(argv: Sequence[str]) -> BenchOptions:
    """Read the command line. Raises ConfigError, one line."""
    given = make_parser().parse_args(list(argv))
    return BenchOptions(
        mode=given.mode,
        layers=given.layers,
        vram_gib=given.vram,
        cache_tokens=given.cache_tokens,
        chunk_tokens=given.chunk,
        max_slots=given.max_slots,
        reserve_gib=given.reserve,
        landing=given.landing,
        ahead=given.ahead,
        guess_recall=given.guess_recall,
        offers=given.offers,
        cpus=given.cpus,
        threads=given.threads,
        streams=tuple(given.streams),
        warm_steps=given.warm,
        steps=given.steps,
        prefill_tokens=tuple(given.prefill),
        beside_tokens=given.beside,
        beside_layers=given.beside_layers,
        soak_s=given.soak,
        out=given.out,
        tuning_dir=given.tuning_dir,
        graphs=not given.no_graphs,
        ct_prefill=given.ct_prefill,
        routes=given.routes,
        ct_split=given.ct_split,
        whole_cache=given.whole_cache,
        chunk_slots=given.chunk_slots,
    )


def _whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise argparse.ArgumentTypeError(
                f"{text} is not in {minimum}..{'' if maximum is None else maximum}"
            )
        return number

    read.__name__ = "whole number"  # argparse names it in its errors
    return read


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return number
