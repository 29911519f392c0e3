"""What both peers take on their command lines, so that one run gives both the same limits."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.peers.measure import Rounds
from bench.peers.split_plan import SplitPlan, our_experts, plan_split
from glm53srv.machine import GIB, MachineFacts
from glm53srv.model.published import PUBLISHED
from glm53srv.offload.device.cpus import AUTO, choose_cpus

MAX_STREAMS = 4
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Limits of one peer. model_dir: None for weights that are in no file. vram_bytes: its share of the card.

    gpu_experts: of each sparse layer, on the card while decoding, under stock's split; our_experts: likewise,
    in our cache. threads: CPU workers. routes: who picks the
    experts of decode steps, "published" for traces.py or "own" for the random routers.
    """

    model_dir: Path | None
    vram_bytes: int
    cache_tokens: int
    gpu_experts: int
    our_experts: int
    threads: int
    routes: str
    rounds: Rounds
    out: Path | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what both peers take."""
    parser.add_argument("--vram", type=_amount, default=24.0, help="GiB of the card, for the whole model")
    parser.add_argument("--cache-tokens", type=_whole, default=131072)
    parser.add_argument(
        "--experts",
        type=_whole,
        help="of each sparse layer on the card, for both; by default what each holds beside all 45 layers",
    )
    parser.add_argument("--threads", type=_whole, help="CPU workers; by default all cores but two")
    parser.add_argument(
        "--routes",
        choices=("published", "own"),
        default="published",
        help="who picks experts in decode: traces of the published skew and locality, or the random routers",
    )
    parser.add_argument("--warm", type=_whole, default=48, help="steps before timing")
    parser.add_argument("--steps", type=_whole, default=48, help="steps that are timed")
    parser.add_argument("--prefill", type=_whole, default=8192, help="tokens of the long prompt")
    parser.add_argument("--out", type=Path, help="file for all numbers as JSON")


def read_options(given: argparse.Namespace, machine: MachineFacts) -> PeerOptions:
    """Resolve what was given. Raises BadInput where the card is too small for the plan."""
    vram_bytes = int(given.vram * GIB)
    experts = given.experts or whole_plan(vram_bytes, given.cache_tokens).gpu_experts
    ours = given.experts or our_experts(PUBLISHED, vram_bytes, given.cache_tokens, CHUNK_TOKENS)
    return PeerOptions(
        model_dir=given.model_dir,
        vram_bytes=vram_bytes,
        cache_tokens=given.cache_tokens,
        gpu_experts=min(experts, PUBLISHED.moe.num_experts),
        our_experts=min(ours, PUBLISHED.moe.num_experts),
        threads=given.threads or len(choose_cpus(AUTO, machine)),
        routes=given.routes,
        rounds=Rounds(warm_steps=given.warm, steps=given.steps, prefill_tokens=given.prefill),
        out=given.out,
    )


def whole_plan(vram_bytes: int, cache_tokens: int) -> SplitPlan:
    """Plan for all layers, whichever number of them runs. Raises BadInput."""
    return plan_split(PUBLISHED, vram_bytes, cache_tokens)


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


_whole.__name__, _amount.__name__ = "whole number", "number"  # argparse names them in its errors
