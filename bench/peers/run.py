"""Stock exllamav3 and our engine side by side: one checkpoint, the same prompts and limits, one command.

    python -m bench.peers.run --layers 15 --work /tmp/peers --out OUT

Writes the checkpoint to WORK, measures stock, our engine in fast mode, and our engine in exact mode, each in
a process of its own with a time limit, prints a table, and deletes the checkpoint (--keep leaves it; a later
run takes one that is there as it is, and leaves it). OUT gets peers.json, peers.txt, and of each part a log
and all figures. A part that fails or takes too long does not keep the others from running, and what it had
measured until then stays in the table.

Exit codes: 0 all measured, 1 some part failed, 2 nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.errors import BadInput, BenchError
from bench.facts import REPOSITORY, machine_facts, utc_now
from bench.peers.checkpoint import MARKER, read_marker
from bench.peers.options import add_options, read_options
from bench.peers.table import render
from glm53srv.errors import Glm53Error
from glm53srv.machine import read_machine
from glm53srv.model.published_files import published_model

LOG_LINES = 12
"""Lines of a failed part's log that are shown."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process. limit_s: seconds after which it is ended, with all that it started."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended. code: its exit code, negative for a signal; None if it was not run or timed out."""

    name: str
    code: int | None
    elapsed_s: float
    note: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it did what it should."""
        return self.code == 0

    def __str__(self) -> str:
        verdict = "ok" if self.is_good else self.note or f"exit code {self.code}"
        return f"{self.name:12s} {self.elapsed_s:6.1f} s  {verdict}"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One run. peer_limit_s: for every peer, None for PEER_LIMITS_S. peer_arguments: passed to each peer as
    they are."""

    layers: int | None
    work_dir: Path
    out_dir: Path
    keeps: bool
    write_limit_s: float
    peer_limit_s: float | None
    peer_arguments: tuple[str, ...]


Commands = Callable[[RunOptions, str], Sequence[str]]
"""Gives the command of a part, by its name."""

PEER_LIMITS_S = {"stock": 300.0, "ours-fast": 140.0, "ours-exact": 140.0}
"""By default. Stock took 134 s to open, loading and tuning its Triton kernels: H200, 30 November 2026."""
PEERS = tuple(PEER_LIMITS_S)


def peer_command(options: RunOptions, name: str) -> Sequence[str]:
    """Give the command of a part: checkpoint, or one of PEERS."""
    python = (sys.executable, "-m")
    model_dir = str(options.work_dir)
    if name == "checkpoint":
        layers = () if options.layers is None else ("--layers", str(options.layers))
        return (*python, "bench.peers.checkpoint", model_dir, *layers)
    shared = ("--out", str(result_path(options, name)), *options.peer_arguments)
    if name == "stock":
        return (*python, "bench.peers.stock", model_dir, *shared)
    return (*python, "bench.peers.ours", model_dir, "--mode", name.removeprefix("ours-"), *shared)


def peer_limit_s(options: RunOptions, name: str) -> float:
    """Give the seconds after which one of PEERS is ended."""
    return PEER_LIMITS_S[name] if options.peer_limit_s is None else options.peer_limit_s


def result_path(options: RunOptions, name: str) -> Path:
    """Name a peer's file of figures."""
    return options.out_dir / f"{name}.json"


def run_part(part: Part, log_path: Path) -> Outcome:
    """Run a part to its end or its limit; what it prints goes to log_path."""
    begin = time.perf_counter()
    with log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                part.command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, start_new_session=True
            )
        except OSError as error:
            return Outcome(part.name, None, 0.0, f"cannot be started: {error}")
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            elapsed = time.perf_counter() - begin
            return Outcome(part.name, None, elapsed, f"ended after its limit of {part.limit_s:.0f} s")
        finally:
            # Whatever it started belongs to its session, also what outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(part.name, code, time.perf_counter() - begin)


def run_all(options: RunOptions, commands: Commands = peer_command) -> int:
    """Run the parts one after the other; gives the exit code. Raises BadInput for a directory in the way."""
    prepare(options)
    was_there = read_marker(options.work_dir) is not None
    say(f"begun {utc_now()}, results in {options.out_dir}")
    try:
        outcomes = [_run(options, "checkpoint", options.write_limit_s, commands)]
        for name in PEERS:
            if outcomes[0].is_good:
                outcomes.append(_run(options, name, peer_limit_s(options, name), commands))
            else:
                outcomes.append(Outcome(name, None, 0.0, "not run: there is no checkpoint"))
        drawn = read_marker(options.work_dir)
        layers = drawn.layers if drawn is not None else options.layers
    finally:
        if not (options.keeps or was_there):
            shutil.rmtree(options.work_dir, ignore_errors=True)
    _conclude(options, outcomes, layers)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def prepare(options: RunOptions) -> None:
    """Make the directories. Raises BadInput where one holds what is not ours to overwrite or delete."""
    work = options.work_dir
    if work.exists() and (not work.is_dir() or (any(work.iterdir()) and not (work / MARKER).is_file())):
        raise BadInput(f"--work {work}: is not empty and no finished checkpoint; name another directory")
    try:
        options.out_dir.mkdir(parents=True, exist_ok=True)
        for name in PEERS:  # of an earlier run
            result_path(options, name).unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"--out {options.out_dir}: cannot be written ({error.strerror})") from error


def _run(options: RunOptions, name: str, limit_s: float, commands: Commands) -> Outcome:
    log_path = options.out_dir / f"{name}.log"
    outcome = run_part(Part(name, tuple(commands(options, name)), limit_s), log_path)
    say(str(outcome))
    if not outcome.is_good and log_path.exists():
        for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]:
            say(f"    {line[:200]}")
    return outcome


def _conclude(options: RunOptions, outcomes: Sequence[Outcome], layers: int | None) -> None:
    peers = {name: found for name in PEERS if (found := _read(result_path(options, name)))}
    text = "\n".join(str(outcome) for outcome in outcomes)
    measured = {name: found for name, found in peers.items() if "first_token_s" in found}
    if measured and layers is not None:
        text += "\n\n" + render(measured, layers)
    summary: dict[str, Any] = {
        "command": sys.argv,
        "machine": machine_facts(),
        "layers": layers,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "peers": peers,
    }
    (options.out_dir / "peers.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (options.out_dir / "peers.txt").write_text(text + "\n", encoding="utf-8")
    say("\n" + text)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def say(text: str) -> None:
    """Print at once: the last lines are what a tail shows."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def parse(argv: Sequence[str] | None) -> RunOptions:
    """Read the command line. Raises BadInput or ConfigError for what a part would refuse minutes later."""
    parser = argparse.ArgumentParser(
        prog="bench.peers.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="--vram, --experts, --threads, --cache-tokens, --routes, --warm, --steps and --prefill go to "
        "both peers: see bench.peers.stock --help.",
    )
    parser.add_argument("--layers", type=int, help="the first N; by default 15, or as many as the disk holds")
    parser.add_argument(
        "--work", type=Path, required=True, help="directory for the checkpoint, not yet there"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint")
    parser.add_argument("--write-limit", type=float, default=150.0, help="seconds for the checkpoint")
    limits = ", ".join(f"{name} {limit_s:.0f}" for name, limit_s in PEER_LIMITS_S.items())
    parser.add_argument("--peer-limit", type=float, help=f"seconds for each peer alike (default: {limits})")
    given, others = parser.parse_known_args(argv)
    shared = argparse.ArgumentParser(prog="bench.peers.run", allow_abbrev=False)
    add_options(shared)
    shared.set_defaults(model_dir=given.work)
    read_options(shared.parse_args(others), read_machine())
    if given.layers is not None:
        published_model(given.layers)
    return RunOptions(
        layers=given.layers,
        work_dir=given.work.absolute(),
        out_dir=given.out.absolute(),
        keeps=given.keep,
        write_limit_s=given.write_limit,
        peer_limit_s=given.peer_limit,
        peer_arguments=tuple(others),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    try:
        return run_all(parse(argv))
    except (BenchError, Glm53Error) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
