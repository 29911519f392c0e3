"""The measures, the same for every peer: the same plans in the same order, with the same drawn
tokens.

short prompts -> long prompts -> for 1, 2, 4 rows: prompts, experts held to the share, warm steps, timed steps
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from glm53srv.bench_model.driver import Driver, Routes
from glm53srv.engine.base import Engine

Note = Callable[[str, Any], None]


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often what is measured. widths: rows of a decode step."""

    warm_steps: int = 48
    steps: int = 48
    prefill_tokens: int = 8192
    prompt_tokens: int = 96
    widths: tuple[int, ...] = (1, 2, 4)
    short_repeats: int = 3
    long_repeats: int = 2


class Peer(Protocol):
    """An open engine and what a measurement wants of it beside steps. Engine thread only."""

    @property
    def engine(self) -> Engine:
        """The engine, warm."""

    @property
    def routes(self) -> Routes | None:
        """What prescribes the experts of decode steps, None for the model's own routers."""

    def holding(self) -> AbstractContextManager[None]:
        """Keep to the share of experts on the card while decode is timed."""

    def counts(self) -> Mapping[str, int]:
        """Counters so far; their growth per step is noted."""

    def facts(self) -> dict[str, Any]:
        """What it is and what it took, at the end."""

    def close(self) -> None:
        """Free everything."""


def measure(peer: Peer, rounds: Rounds, note: Note, seed: int = 0) -> None:
    """Measure an open peer; note takes each figure, by name, as it comes."""
    driver = Driver(peer.engine, seed, peer.routes)
    note("first_token_s", time_prompts(driver, rounds.prompt_tokens, rounds.short_repeats))
    note("prefill_s", time_prompts(driver, rounds.prefill_tokens, rounds.long_repeats))
    for width in rounds.widths:
        note(f"decode_{width}", time_decode(driver, peer, width, rounds))


def time_prompts(driver: Driver, num_tokens: int, repeats: int) -> list[float]:
    """Time prompts of num_tokens to their first token, each for itself, in s."""
    times = []
    for _ in range(repeats):
        times.append(driver.prefill_s(0, num_tokens))
        driver.step(release=[0])
    return times


def time_decode(driver: Driver, peer: Peer, width: int, rounds: Rounds) -> dict[str, float]:
    """Time decode steps of `width` sequences. tok_s by the mean step; growth of the counters per step."""
    slots = list(range(width))
    for slot in slots:
        driver.prefill_s(slot, rounds.prompt_tokens)
    with peer.holding():
        for _ in range(rounds.warm_steps):
            driver.step(decode=slots)
        before = dict(peer.counts())
        times = [driver.time_step(decode=slots) for _ in range(rounds.steps)]
        after = peer.counts()
    driver.step(release=slots)
    spent = {name: (after[name] - count) / rounds.steps for name, count in before.items()}
    return {
        "tok_s": width * len(times) / sum(times),
        "step_ms": statistics.median(times) * 1e3,
        "mean_step_ms": statistics.fmean(times) * 1e3,
        "longest_step_ms": max(times) * 1e3,
        **spent,
    }
