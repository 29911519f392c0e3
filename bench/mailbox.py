"""`python -m bench.mailbox`: time the CPU tier at GLM-5.3-Flash's size: hand-over, wake-up, experts per job.

    hand-over   post to answer of a job without picks, crew awake: what a GPU step pays for asking
    wake-up     the same after a pause in which the crew parked
    experts     jobs of 1 to 8 experts, cold from DRAM, and the fixed and per-expert cost fitted to them

Posting and waiting happen in Python here, so the hand-over contains two calls through cffi; a GPU has its own
costs instead. This thread keeps to the first core, the crew's lead to the second, its other workers to the
rest and then the first: two threads that spin on one core would measure the scheduler. Times are medians,
with the fastest beside them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from glm53srv.kernels import Precision
from glm53srv.machine import read_machine
from glm53srv.model.checkpoint import CodebookName
from glm53srv.offload.cost import fit_lane_cost
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.layout import RecordLayout
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape
from glm53srv.offload.device.region import Pages
from glm53srv.offload.geometry import ExpertGeometry

HIDDEN, INTERMEDIATE, WORDS, TOP_K, ROWS = 4096, 2048, 48, 8, 4
NUM_EXPERTS = 40
"""378 MB of packed weights: no cache holds them."""

POLL_US = 5000


@dataclass(frozen=True, slots=True)
class Job:
    """rows share their picks; the weights are all equal."""

    x: np.ndarray
    picks: np.ndarray
    weights: np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mailbox", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precision", choices=[each.name for each in Precision], default="FAST16")
    parser.add_argument("--jobs", type=int, default=2000, help="jobs without picks")
    parser.add_argument("--repeats", type=int, default=15, help="jobs of each number of experts")
    arguments = parser.parse_args(argv)
    arena = random_arena()
    cores = read_machine().core_cpus
    os.sched_setaffinity(0, cores[:1])
    print(f"pages: {arena.region.pages.name.lower()} {arena.region.refusal}".strip())
    for num_threads in arguments.threads:
        mailbox = Mailbox(MailboxShape(ROWS, TOP_K, HIDDEN))
        options = CrewOptions(
            num_threads,
            cpus=(*cores[1:], cores[0]),
            precision=Precision[arguments.precision],
            limit=10.0,
            poll_us=POLL_US,
            deadline_ms=60_000,
        )
        with Crew(arena, mailbox, options) as crew:
            print(f"\n{num_threads} threads, {arguments.precision}")
            time_hand_over(crew, arguments.jobs)
            time_wake_up(crew)
            time_experts(crew, mailbox, arguments.repeats)
    return 0


def random_arena() -> ExpertArena:
    """Give an arena of random experts: any bytes are a valid trellis."""
    layout = RecordLayout(HIDDEN, INTERMEDIATE, (WORDS, WORDS, WORDS), CodebookName.MUL1)
    geometry = ExpertGeometry(1, NUM_EXPERTS, TOP_K, layout.record_bytes)
    arena = ExpertArena(layout, geometry, ArenaOptions(Pages.TRANSPARENT))
    rng = np.random.default_rng(0)
    arena.records[:] = rng.integers(0, 256, arena.records.shape, dtype=np.uint8)
    arena.scales[:] = rng.choice([-1.0, 1.0], arena.scales.shape) * 0.02
    return arena


def time_hand_over(crew: Crew, num_jobs: int) -> None:
    times = [_time(crew, job) for job in itertools.islice(_jobs(1, 0), num_jobs)]
    median, fastest = _summary(times[num_jobs // 10 :])
    print(f"hand-over  {median * 1e6:8.1f} us, fastest {fastest * 1e6:.1f}; {1 / median:,.0f} jobs/s")


def time_wake_up(crew: Crew, num_jobs: int = 30) -> None:
    before = crew.stats().num_parks
    times = []
    for job in itertools.islice(_jobs(1, 0), num_jobs):
        time.sleep(3 * POLL_US / 1e6)
        times.append(_time(crew, job))
    median, fastest = _summary(times)
    print(
        f"wake-up    {median * 1e6:8.1f} us, fastest {fastest * 1e6:.1f}; "
        f"{crew.stats().num_parks - before} parks in {num_jobs} jobs"
    )


def time_experts(crew: Crew, mailbox: Mailbox, repeats: int) -> None:
    """Print a line per number of rows and experts, and the cost model's two numbers for each row count."""
    for rows in (1, ROWS):
        samples: list[tuple[int, float]] = []
        for count in (1, 2, 4, 8):
            elapsed_ms = []
            for job in itertools.islice(_jobs(rows, count), repeats):
                seq = crew.post(0, job.x, job.picks, job.weights)
                crew.wait(seq, rows)
                elapsed_ms.append(mailbox.answer(seq).elapsed_ms)
            samples += [(count, each) for each in elapsed_ms]
            median, fastest = _summary(elapsed_ms)
            print(
                f"experts    rows {rows}, {count} experts: {median:7.2f} ms, fastest {fastest:.2f}; "
                f"{median / count:.2f} ms per expert"
            )
        fixed_ms, expert_ms = fit_lane_cost(samples)
        print(f"cost       rows {rows}: GLM53_CT_A={fixed_ms:.3f} GLM53_CT_B={expert_ms:.3f}")


def _jobs(rows: int, num_picked: int) -> Iterator[Job]:
    """Walk through all experts, num_picked at a time, so that each comes back cold."""
    x = np.random.default_rng(1).normal(size=(rows, HIDDEN)).astype(np.float32)
    weights = np.full((rows, TOP_K), 1 / TOP_K, np.float32)
    for number in itertools.count():
        picks = np.full((rows, TOP_K), -1, np.int32)
        picks[:, :num_picked] = (number * num_picked + np.arange(num_picked)) % NUM_EXPERTS
        yield Job(x, picks, weights)


def _time(crew: Crew, job: Job) -> float:
    begin_s = time.perf_counter()
    crew.wait(crew.post(0, job.x, job.picks, job.weights), len(job.x))
    return time.perf_counter() - begin_s


def _summary(times: Sequence[float]) -> tuple[float, float]:
    return statistics.median(times), min(times)


if __name__ == "__main__":
    raise SystemExit(main())
