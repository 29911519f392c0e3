"""Keep a server busy with mixed requests for a time, and watch that nothing grows or gets stuck.

    python3 -m bench.mixed_load --url http://127.0.0.1:30000 --minutes 30 --workers 4 --pid 1234

Each worker sends one request after the other: prompts from a few tokens to --max-prompt (short ones more
often: the logarithm is uniform), answers of up to --max-output; some are chats, some go on from the prompt
before as a second turn does, and one in ten leaves in the middle. Meanwhile /stats and, with --pid on the
server's machine, the server's memory are read every --watch-s seconds. Broken requests, floods and slow
readers are soak's business, not this one's.

Passes when no request failed, the server's own (anonymous) memory grew by at most --max-growth-mib between
the first fifth of the time and the end, and nothing runs, waits or holds pages afterwards.

Exit code 0: passed; 1: not; 2: could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import measure
from bench.errors import BenchError
from bench.facts import process_memory
from bench.report import (
    Check,
    Progress,
    client_of,
    client_parser,
    close_report,
    open_report,
    run_command,
    table,
)

TOOL = "mixed_load"
KINDS = ("prompt", "prompt", "chat", "second turn", "leaves")
SHORTEST_PROMPT = 4
REST_S = 15.0
SETTLED_SHARE = 0.2
"""Caches of tokens, arrays and connections fill in the first part of the time; growth counts from there."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment. at_s: since the start. anonymous_bytes: None without --pid."""

    at_s: float
    num_running: int | None
    num_waiting: int | None
    num_pages_used: int | None
    anonymous_bytes: int | None


@dataclass(slots=True)
class Tally:
    """What the workers did, under one lock."""

    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, problem: str | None = None) -> None:
        """Count a request."""
        with self.lock:
            self.kinds[kind] += 1
            if problem is not None:
                self.problems.append(f"{kind}: {problem}")


class Worker:
    """Sends requests until the time is over. One thread."""

    def __init__(self, bench: measure.Bench, options: argparse.Namespace, tally: Tally, seed: int) -> None:
        self._bench = bench
        self._options = options
        self._tally = tally
        self._rng = random.Random(seed)
        self._seen: list[int] = []

    def run(self, is_over: Callable[[], bool]) -> None:
        """Send one request after the other, and one at least."""
        while True:
            kind = self._rng.choice(KINDS)
            try:
                self._send(kind)
            except BenchError as error:
                self._tally.add(kind, str(error))
            else:
                self._tally.add(kind)
            if is_over():
                return

    def _send(self, kind: str) -> None:
        max_tokens = self._rng.randint(1, self._options.max_output)
        if kind == "chat":
            self._bench.ask(self._rng.randrange(1_000_000), max_tokens)
            return
        ids = self._bench.random_ids(self._length())
        if kind == "second turn":
            ids = [*self._seen, *ids[: max(self._options.max_prompt - len(self._seen), 1)]]
        if kind == "leaves":
            wanted = self._rng.randint(1, max_tokens)
            self._bench.prompter(self._bench.client, ids, max_tokens, lambda num: num >= wanted)
            return
        timed = self._bench.prompt(ids, max_tokens)
        self._seen = [*ids, *timed.output_ids] if len(ids) < self._options.max_prompt // 2 else []
        if timed.completion_tokens != max_tokens and timed.finish != "stop":
            raise BenchError(f"{timed.completion_tokens} tokens came, {max_tokens} were asked for")

    def _length(self) -> int:
        low, high = math.log(SHORTEST_PROMPT), math.log(self._options.max_prompt)
        return max(round(math.exp(self._rng.uniform(low, high))), 1)


class Watch:
    """Takes a sample at every tick."""

    def __init__(self, bench: measure.Bench, process_id: int | None) -> None:
        self._bench = bench
        self._process_id = process_id
        self._begin_s = time.monotonic()
        self.samples: list[Sample] = []

    def tick(self) -> Sample:
        """Look at the server once."""
        scheduler: dict[str, Any] = {}
        with contextlib.suppress(BenchError):  # without /stats the memory alone is watched; main says so
            scheduler = self._bench.client.get("/stats").get("scheduler") or {}
        memory = {} if self._process_id is None else process_memory(self._process_id)
        sample = Sample(
            at_s=round(time.monotonic() - self._begin_s, 1),
            num_running=scheduler.get("num_running"),
            num_waiting=scheduler.get("num_waiting"),
            num_pages_used=scheduler.get("num_pages_used"),
            anonymous_bytes=memory.get("anonymous_bytes"),
        )
        self.samples.append(sample)
        return sample

    def until_at_rest(self) -> Sample:
        """Wait until nothing runs or waits, for a while; gives the last sample."""
        end_s = time.monotonic() + REST_S
        while True:
            sample = self.tick()
            is_busy = sample.num_running or sample.num_waiting
            if not is_busy or time.monotonic() > end_s:
                return sample
            time.sleep(0.2)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    client = client_of(options)
    report = open_report(TOOL, argv, client, out=options.out, secret=options.api_key)
    bench = measure.Bench.open(client, report.server_before or {}, template="server", id_range=None)
    options.max_prompt = min(options.max_prompt, bench.context_tokens - options.max_output - 1)
    if options.max_prompt < SHORTEST_PROMPT:
        raise BenchError(f"--max-output {options.max_output} leaves no room in {bench.context_tokens} tokens")
    if options.pid is not None and not process_memory(options.pid):
        raise BenchError(f"--pid {options.pid}: no such process on this machine")
    watch, tally = Watch(bench, options.pid), Tally()
    before = watch.tick()
    run_load(bench, options, tally, watch, Progress(None if options.quiet else sys.stderr))
    after = watch.until_at_rest()
    report.result = {
        "requests": dict(tally.kinds),
        "problems": tally.problems[:100],
        "completion_tokens": bench.received,
        "prompt_tokens": bench.sent,
        "samples": [[getattr(sample, name) for name in Sample.__slots__] for sample in watch.samples],
        "sample_fields": list(Sample.__slots__),
    }
    report.checks.append(Check("failed requests", len(tally.problems), 0))
    report.notes += tally.problems[:5]
    growth = growth_mib(watch.samples)
    if growth is None:
        report.notes.append("memory was not watched: give --pid on the server's machine, and more time")
    else:
        report.checks.append(Check("growth of memory in MiB", growth, options.max_growth_mib))
    report.checks += _rest_checks(before, after)
    if after.num_running is None:
        report.notes.append("the server has no /stats: slots and pages were not watched")
    return close_report(report, options.out, _table(tally, watch.samples), client)


def run_load(
    bench: measure.Bench, options: argparse.Namespace, tally: Tally, watch: Watch, progress: Progress
) -> None:
    """Run the workers for the time, watching meanwhile."""
    end_s = time.monotonic() + 60 * options.minutes
    threads = [
        threading.Thread(
            target=Worker(bench, options, tally, options.seed + number).run,
            args=(lambda: time.monotonic() >= end_s,),
            daemon=True,
        )
        for number in range(options.workers)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(options.watch_s)
        sample = watch.tick()
        progress(
            f"{sample.at_s:.0f} s: {sum(tally.kinds.values())} requests, {len(tally.problems)} failed, "
            f"running {sample.num_running}, waiting {sample.num_waiting}, pages {sample.num_pages_used}, "
            f"memory {_mib(sample.anonymous_bytes)} MiB"
        )
        if not threads[0].is_alive():
            for thread in threads:
                thread.join()


def growth_mib(samples: Sequence[Sample]) -> float | None:
    """Give how much memory grew from the most of the settled fifth to the end; None without enough samples.

    The settled fifth is the second one: the most of it, since memory swings with what runs.
    """
    known = [sample for sample in samples if sample.anonymous_bytes is not None]
    if len(known) < 5:
        return None
    span = known[-1].at_s
    settled = [
        sample.anonymous_bytes or 0
        for sample in known
        if SETTLED_SHARE * span <= sample.at_s <= 2 * SETTLED_SHARE * span
    ]
    if not settled:
        return None
    return ((known[-1].anonymous_bytes or 0) - max(settled)) / 2**20


def _rest_checks(before: Sample, after: Sample) -> list[Check]:
    pairs = (
        ("sequences that run afterwards", after.num_running, 0),
        ("sequences that wait afterwards", after.num_waiting, 0),
        ("pages held afterwards", after.num_pages_used, before.num_pages_used),
    )
    return [Check(name, value, limit or 0) for name, value, limit in pairs if value is not None]


def _mib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else str(num_bytes // 2**20)


def _table(tally: Tally, samples: Sequence[Sample]) -> str:
    running = [sample.num_running for sample in samples if sample.num_running is not None]
    pages = [sample.num_pages_used for sample in samples if sample.num_pages_used is not None]
    memory = [sample.anonymous_bytes for sample in samples if sample.anonymous_bytes is not None]
    rows: list[list[object]] = [[f"requests: {kind}", count] for kind, count in sorted(tally.kinds.items())]
    rows += [["most running", max(running)]] if running else []
    rows += [["most pages used", max(pages)]] if pages else []
    for name, value in (("first", memory[:1]), ("most", [max(memory, default=0)]), ("last", memory[-1:])):
        rows += [[f"memory, {name}, MiB", value[0] // 2**20]] if memory else []
    return table(["what", "value"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = client_parser(TOOL, __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="how long (%(default)s)")
    add("--workers", type=int, default=4, help="requests at once (%(default)s)")
    add("--max-prompt", type=int, default=131072, help="longest prompt, at most the context (%(default)s)")
    add("--max-output", type=int, default=256, help="longest answer (%(default)s)")
    add("--pid", type=int, help="the server's process, to watch its memory")
    add("--max-growth-mib", type=float, default=200.0, help="largest good growth (%(default)s)")
    add("--watch-s", type=float, default=5.0, help="seconds between two looks (%(default)s)")
    add("--seed", type=int, default=1, help="of the mix, not of the prompts (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
