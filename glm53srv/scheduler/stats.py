"""What the scheduler counts, and the snapshot of it that others read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counts since the start; they only grow. Owned by Scheduler."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_tokens: int = 0  # computed by prefill, so a preempted sequence's count again
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. total_*: only grow. Rates: per second, over about the last ten seconds (cost.Rate)."""

    num_running: int
    num_waiting: int
    max_streams: int
    max_queue: int
    num_pages_used: int
    num_pages: int
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    total_requests: int
    total_finished: int
    total_aborted: int
    total_rejected: int
    total_preemptions: int
    total_steps: int
    total_prefill_tokens: int
    total_output_tokens: int
