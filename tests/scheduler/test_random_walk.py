"""Seeded random walks: any order of actions keeps the invariants, ends every request, and leaves nothing.

Every action is followed by check_integrity(); every step is checked by FakeEngine; every output is compared
with the same request generated alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from glm53srv.engine.base import EngineLimits
from glm53srv.engine.fake import FakeCosts
from glm53srv.errors import QueueFull
from glm53srv.request import FinishReason, GenerationRequest, PromptLogprobs, SamplingParams
from glm53srv.scheduler.scheduler import SchedulerSettings
from tests.builders import make_limits, make_request
from tests.scheduler.harness import Bench, Record, run_alone

NUM_ACTIONS = 1500


def random_limits(rng: random.Random) -> EngineLimits:
    """Make limits whose pages are often too few for all streams."""
    page_tokens = rng.choice([1, 2, 4, 8])
    max_context_tokens = rng.randint(8, 48)
    pages_each = -(-max_context_tokens // page_tokens)
    max_streams = rng.randint(1, 4)
    return make_limits(
        max_streams=max_streams,
        max_context_tokens=max_context_tokens,
        max_chunk_tokens=rng.choice([1, 4, 8, 16, 64]),
        page_tokens=page_tokens,
        num_pages=rng.randint(max(pages_each // 2, 2), pages_each * 2),
        num_layers=rng.randint(1, 6),
        vocab_size=12,
    )


def random_request(rng: random.Random, limits: EngineLimits, index: int) -> GenerationRequest:
    longest = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens) - 1
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.getrandbits(64),
        min_tokens=rng.choice([0, 0, 3]),
        ignore_eos=rng.random() < 0.6,
        presence_penalty=rng.choice([0.0, 0.0, 1.0]),
    )
    request = make_request(
        f"r{index}",
        prompt_ids=[
            rng.randrange(12) for _ in range(rng.randint(1, rng.choice([longest, -(-longest // 4)])))
        ],
        max_tokens=rng.choice([None, 1, rng.randint(1, 60)]),
        sampling=sampling,
    )
    if rng.random() < 0.3:
        wanted = PromptLogprobs(rng.randint(1, 6), num_top=1)
        request = replace(request, prompt_logprobs=wanted, max_tokens=rng.choice([0, request.max_tokens]))
    return request


class Walk:
    """One walk: what was submitted, and which of it was ended from outside."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.limits = random_limits(self.rng)
        settings = SchedulerSettings(
            max_queue=self.rng.randint(0, 6), token_interval_s=self.rng.choice([0.01, 0.3]), idle_slice_s=1.0
        )
        costs = FakeCosts(layer_token_s=self.rng.choice([0.0, 0.01, 0.2]), decode_row_s=0.01)
        self.bench = Bench(self.limits, settings=settings, costs=costs)
        self.end_rate = self.rng.choice([0.0, 0.01, 0.06])
        self.live: list[Record] = []
        self.ended_outside: set[int] = set()

    def act(self) -> None:
        if self.rng.random() < self.end_rate:
            self._end(self.rng.choice([self.bench.abort, self.bench.abort, self.bench.finish]))
        elif self.rng.random() < 0.12:
            self._submit()
        elif self.bench.is_in_flight:
            self.bench.end()
        else:
            self.bench.begin()
        self.live = [record for record in self.live if record.sequence.is_live]

    def _submit(self) -> None:
        request = random_request(self.rng, self.limits, len(self.bench.records))
        with suppress(QueueFull):
            self.live.append(self.bench.submit(request))

    def _end(self, end: Callable[[Record], bool]) -> None:
        if self.live:
            record = self.rng.choice(self.live)
            assert end(record)
            self.ended_outside.add(record.sequence.sequence_id)


@pytest.mark.parametrize("seed", range(40))
def test_random_walk(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(NUM_ACTIONS):
        walk.act()
    if walk.bench.is_in_flight:
        walk.bench.end()
    # Nothing ends them from here on, so only progress can. Each of the few sequences left needs at most its
    # tokens times its layers of steps, and may be computed again as often as an elder takes a page.
    walk.bench.run_to_end(max_steps=20_000)

    records = walk.bench.records
    assert len(records) > 20
    for sequence_id, record in records.items():
        alone = run_alone(record.sequence.request, walk.limits)
        expected = alone.token_ids
        told = record.prompt_logprobs
        assert told == alone.prompt_logprobs[: len(told)]
        if record.finish is not None or record.token_ids:
            assert len(told) == len(alone.prompt_logprobs)
        if sequence_id in walk.ended_outside:
            assert record.token_ids == expected[: len(record.token_ids)]
            assert record.finish is None
        else:
            assert record.token_ids == expected
            assert record.finish in (FinishReason.STOP, FinishReason.LENGTH)
    stats = walk.bench.stats
    assert stats.total_finished + stats.total_aborted == stats.total_requests == len(records)


def test_walks_reach_what_they_are_for() -> None:
    """Without preemption, refusal and ends in flight the walks above would prove little."""
    totals = {"preemptions": 0, "rejected": 0, "aborted": 0, "ended in flight": 0}
    for seed in range(10):
        walk = Walk(seed)
        for _ in range(NUM_ACTIONS):
            was_in_flight = walk.bench.is_in_flight
            num_ended = len(walk.ended_outside)
            walk.act()
            totals["ended in flight"] += was_in_flight and len(walk.ended_outside) > num_ended
        stats = walk.bench.stats
        totals["preemptions"] += stats.total_preemptions
        totals["rejected"] += stats.total_rejected
        totals["aborted"] += stats.total_aborted
    assert min(totals.values()) >= 40, totals
