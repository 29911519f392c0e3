"""`python -m bench.mailbox`: time the CPU tier at GLM-5.3-Flash's size: hand-over, wake-up, experts per job.

    hand-over   post to answer of a job without picks, crew awake: what a GPU step pays for asking
    wake-up     the same after a pause in which the crew parked
    in a row    jobs of 1 to 4 experts, cold from DRAM, many posted at once, as the crew times them, and the
                fixed and per-expert cost fitted to them: GLM53_CT_A and GLM53_CT_B
    singly      the same, each job posted after the answer of the one before
    alone       as many threads, each with a pool and experts of its own: the kernels without any hand-over
    read        as many threads that only read the weights: what DRAM gives

A job that is slower than `alone` by more than a few per cent loses time between its threads; where `alone` is
slower than `read` by more than a quarter, the kernels are what bounds it, not the memory.

Posting and waiting happen in Python here, so the hand-over contains two calls through cffi; a GPU has its own
costs instead. This thread keeps to the first core, the crew's lead to the second, its other workers to the
rest and then the first: two threads that spin on one core would measure the scheduler. So leave a core free:
with as many threads as cores, one of them shares the poster's, which is asleep only while a row of jobs is
computed. Needs 2.3 GB of memory. Times are medians, with the fastest beside them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from glm53srv.kernels import ExpertTable, Isa, KernelPool, Precision
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
LIMIT = 10.0
NUM_EXPERTS = 224
"""2.1 GB of packed weights: no cache of any server holds a noticeable part of them."""

JOB_SIZES = (1, 2, 3, 4)
POLL_US = 5000


@dataclass(frozen=True, slots=True)
class Job:
    """rows share their picks; the weights are all equal."""

    x: np.ndarray
    picks: np.ndarray
    weights: np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mailbox", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, ROWS], choices=range(1, ROWS + 1))
    parser.add_argument("--isa", choices=[isa.name for isa in Isa], default=Isa.AUTO.name)
    parser.add_argument("--precision", choices=[each.name for each in Precision], default="FAST16")
    parser.add_argument("--jobs", type=int, default=2000, help="jobs without picks")
    parser.add_argument("--repeats", type=int, default=60, help="jobs of each number of experts")
    arguments = parser.parse_args(argv)
    precision, isa = Precision[arguments.precision], Isa[arguments.isa]
    arena = random_arena()
    table = ExpertTable(arena.experts(0))
    cores = read_machine().core_cpus
    cpus = (*cores[1:], cores[0])
    os.sched_setaffinity(0, cores[:1])
    print(f"pages: {arena.region.pages.name.lower()} {arena.region.refusal}".strip())
    for num_threads in arguments.threads:
        shares = " (one shares the poster's core)" if num_threads >= len(cores) else ""
        with KernelPool(1, isa) as pool:  # refuses what is not there, and tells what AUTO takes
            isa = pool.isa
        print(f"\n{num_threads} threads of {len(cores)} cores{shares}, {precision.name}, {isa.name}")
        mailbox = Mailbox(MailboxShape(ROWS, TOP_K, HIDDEN))
        options = CrewOptions(
            num_threads,
            cpus=cpus,
            isa=isa,
            precision=precision,
            limit=LIMIT,
            poll_us=POLL_US,
            deadline_ms=60_000,
        )
        with Crew(arena, mailbox, options) as crew:
            time_hand_over(crew, arguments.jobs)
            time_wake_up(crew)
            for rows in arguments.rows:
                time_jobs(crew, mailbox, rows, arguments.repeats)
        for rows in arguments.rows:
            time_alone(table, cpus[:num_threads], rows, precision, isa)
        time_read(arena, cpus[:num_threads])
    return 0


def random_arena() -> ExpertArena:
    """Give an arena of random experts: any bytes are a valid trellis."""
    layout = RecordLayout(HIDDEN, INTERMEDIATE, (WORDS, WORDS, WORDS), CodebookName.MUL1)
    geometry = ExpertGeometry(1, NUM_EXPERTS, TOP_K, layout.record_bytes)
    arena = ExpertArena(layout, geometry, ArenaOptions(Pages.TRANSPARENT))
    rng = np.random.default_rng(0)
    for record in arena.records:  # one by one: all at once would need the memory twice
        words = record.view(np.uint64)
        words[:] = rng.integers(0, 2**64, words.shape, dtype=np.uint64)
    arena.scales[:] = rng.choice(np.array([-0.02, 0.02], np.float16), arena.scales.shape)
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


def time_jobs(crew: Crew, mailbox: Mailbox, rows: int, repeats: int) -> None:
    """Print the time of jobs by their number of experts, and the cost model's two numbers."""
    for name, batch_size in (("in a row", mailbox.shape.num_cells), ("singly", 1)):
        samples: list[tuple[int, float]] = []
        cells = []
        for count in JOB_SIZES:
            jobs = itertools.islice(_jobs(rows, count), repeats)
            elapsed_ms = _elapsed_ms(crew, mailbox, jobs, batch_size)
            samples += [(count, each) for each in elapsed_ms]
            median, fastest = _summary(elapsed_ms)
            cells.append(f"{median:.3f} ({fastest:.3f})")
        fixed_ms, expert_ms = fit_lane_cost(samples)
        print(
            f"{name:<10} rows {rows}, {JOB_SIZES[0]} to {JOB_SIZES[-1]} experts: {'  '.join(cells)} ms; "
            f"GLM53_CT_A={fixed_ms:.3f} GLM53_CT_B={expert_ms:.3f}, "
            f"{_weights_gb_s(expert_ms):.1f} GB/s of weights"
        )


def time_alone(
    table: ExpertTable, cpus: Sequence[int], rows: int, precision: Precision, isa: Isa, num_calls: int = 10
) -> None:
    """Print what the kernels take when every thread has a pool, rows and experts of its own."""
    elapsed_s: list[float] = []

    def compute(thread: int, start: threading.Barrier) -> None:
        jobs = itertools.islice(_jobs(rows, TOP_K, thread * NUM_EXPERTS // len(cpus)), 1 + num_calls)
        with KernelPool(1, isa) as pool:
            for number, job in enumerate(jobs):
                if number == 1:  # the first has sized the pool's memory
                    start.wait()
                begin_s = time.perf_counter()
                pool.experts(job.x, table, job.picks, job.weights, LIMIT, precision=precision)
                if number:
                    elapsed_s.append(time.perf_counter() - begin_s)

    _time_together(compute, cpus)
    thread_ms = 1e3 * statistics.median(elapsed_s) / TOP_K
    expert_ms = thread_ms / len(cpus)
    print(
        f"alone      rows {rows}: {expert_ms:.3f} ms per expert, {thread_ms:.2f} of each thread; "
        f"{_weights_gb_s(expert_ms):.1f} GB/s of weights"
    )


def time_read(arena: ExpertArena, cpus: Sequence[int], num_rounds: int = 3) -> None:
    """Print how fast so many threads read the weights when they do nothing else."""
    print(f"read       {read_rate(arena.records.reshape(-1), cpus, num_rounds):.1f} GB/s")


def read_rate(data: np.ndarray, cpus: Sequence[int], num_rounds: int = 3) -> float:
    """Read uint8 data once with a thread on each CPU; give the best of some rounds in 10^9 bytes a second."""
    words = data[: len(data) // 8 * 8].view(np.uint64)
    parts = np.array_split(words, len(cpus))

    def read(thread: int, start: threading.Barrier) -> None:
        start.wait()
        np.maximum.reduce(parts[thread])

    elapsed_s = min(_time_together(read, cpus) for _ in range(num_rounds))
    return words.nbytes / elapsed_s / 1e9


def _time_together(work: Callable[[int, threading.Barrier], None], cpus: Sequence[int]) -> float:
    """Run work(i, start) in a thread on each CPU; give the seconds from `start` to the last one's end."""
    start = threading.Barrier(len(cpus) + 1)

    def run(thread: int) -> None:
        os.sched_setaffinity(0, cpus[thread : thread + 1])  # 0 is the calling thread
        work(thread, start)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(len(cpus))]
    for thread in threads:
        thread.start()
    start.wait()
    begin_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin_s


def _elapsed_ms(crew: Crew, mailbox: Mailbox, jobs: Iterator[Job], batch_size: int) -> list[float]:
    """Post batch_size jobs, wait for the last, and so on; give what the crew says that each took."""
    elapsed_ms = []
    for batch in iter(lambda: list(itertools.islice(jobs, batch_size)), []):
        seqs = [crew.post(0, job.x, job.picks, job.weights) for job in batch]
        crew.wait(seqs[-1], len(batch[-1].x))
        elapsed_ms += [mailbox.answer(seq).elapsed_ms for seq in seqs]
    return elapsed_ms


def _jobs(rows: int, num_picked: int, first: int = 0) -> Iterator[Job]:
    """Walk through all experts, num_picked at a time, so that each comes back cold."""
    x = np.random.default_rng(1).normal(size=(rows, HIDDEN)).astype(np.float32)
    weights = np.full((rows, TOP_K), 1 / TOP_K, np.float32)
    for number in itertools.count():
        picks = np.full((rows, TOP_K), -1, np.int32)
        picks[:, :num_picked] = (first + number * num_picked + np.arange(num_picked)) % NUM_EXPERTS
        yield Job(x, picks, weights)


def _weights_gb_s(expert_ms: float) -> float:
    return 3 * HIDDEN * INTERMEDIATE * WORDS / 128 / expert_ms / 1e6


def _time(crew: Crew, job: Job) -> float:
    begin_s = time.perf_counter()
    crew.wait(crew.post(0, job.x, job.picks, job.weights), len(job.x))
    return time.perf_counter() - begin_s


def _summary(times: Sequence[float]) -> tuple[float, float]:
    return statistics.median(times), min(times)


if __name__ == "__main__":
    raise SystemExit(main())
