"""Run every benchmark and quality check of this folder, one after the other, against one checkpoint.

    python3 -m bench.all --model .models/random --out results/today --short
    python3 -m bench.all --model /models/glm --panel panel.json --out results/today --serve "--mode fast"

Starts `glm53srv serve` on a free port (--serve: its flags; --url: use a server that runs, as far as that
goes), runs the steps as separate commands, and writes into --out: each step's result and output, and
summary.json with versions, memory at ready and peak, and the kernel's log lines of the time. --short takes
minutes on a small model and checks that everything works; without it the published protocol runs, for hours
on a large one. Without --panel the panel is made by the engine itself, which shows only that the server
serves what its engine computes.

Exit code 0: all steps passed; 1: one failed; 2: one could not be measured.
"""

from __future__ import annotations

import argparse
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.client import Client
from bench.errors import BadInput, BenchError, ServerDown
from bench.facts import REPOSITORY, process_memory
from bench.report import FAILED, NOT_MEASURED, PASSED, Report, close_report, open_report, run_command, table

TOOL = "all"
READY = re.compile(r"ready .*url=(http://[^\s;]+)")
START_TIMEOUT_S = 3600.0
PRECISIONS = ("--a", "engine=cpu", "--b", "engine=cpu", "--b", "precision=fast16")
"""Of the CPU's kernels, also beside a GPU, whose modes need a process each: bench/cuda/check_engine.py."""
STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """What steps are made for. process_id: of a server that was started here. minutes: of mixed load and of
    soak in the full form, None for the published half hour and 5,000 requests."""

    model: Path | None
    url: str
    out: Path
    panel: Path
    is_random: bool
    process_id: int | None
    is_demo: bool = False
    minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One command. full, short: its arguments. skip: a reason to leave it out, or None. needs_server: it
    talks to one; the others run after the server has stopped, so that they have the machine to themselves."""

    name: str
    full: Callable[[Run], list[str]]
    short: Callable[[Run], list[str]]
    skip: Callable[[Run], str | None] = lambda run: None
    needs_server: bool = True
    writes_result: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended. code: its exit code, None when it was left out, for `reason`."""

    name: str
    code: int | None
    seconds: float = 0.0
    reason: str = ""


def _random_model(run: Run) -> str | None:
    return "a random model answers no question" if run.is_random else None


def _needle_words(run: Run) -> list[str]:
    # the demo model reads chats only, was trained on texts of up to 1,024 tokens, and misses some 3 % of the
    # facts itself: the same draws each time, so that a failure is the server's. Of these it misses one of 14,
    # and none of the short form's 3, with every instruction set and precision of the CPU engine
    dialogue = str(REPOSITORY / "reference" / "demo" / "needle.json")
    words = ["--dialogue", dialogue, "--tokens", "300", "700", "--seed", "1", "--min-found", "0.8"]
    return words if run.is_demo else []


def _panel_limits(run: Run) -> list[str]:
    # a sure model's divergence often misses one silent expert, its log probabilities do not: 0.025 in half
    # precision, 0.054 and more with any one of a layer's 32 experts silent (docs/benchmarks.md)
    return ["--max-logprob-error", "0.05"] if run.is_demo else []


def _no_model(run: Run) -> str | None:
    return "runs the engine itself: give --model" if run.model is None else None


def _kl_limits(run: Run) -> list[str]:
    # a random model's logits stand on knife edges: only the control means anything
    return ["--max-kl", "1", "--min-top1", "0"] if run.is_random else []


def _pid(run: Run) -> list[str]:
    return [] if run.process_id is None else ["--pid", str(run.process_id)]


def _minutes(run: Run) -> list[str]:
    return [] if run.minutes is None else ["--minutes", str(run.minutes)]


STEPS: tuple[Step, ...] = (
    Step(
        "score_ref_panel",
        lambda run: ["--url", run.url, "--panel", str(run.panel), *_panel_limits(run)],
        lambda run: ["--url", run.url, "--panel", str(run.panel), *_panel_limits(run)],
    ),
    Step(
        "sweep",
        lambda run: ["--url", run.url, "--no-early-exit"],
        lambda run: [
            *("--url", run.url, "--prefill", "256", "--ttft", "16", "96", "--reps", "2", "--dec-reps", "1"),
            *("--deep", "256", "--deep-tokens", "400", "--turn", "256", "--beside", "512"),
            *("--max-clock-disagreement", "0.5"),  # a few tokens on a busy machine
        ],
    ),
    Step(
        "stream_rate",
        lambda run: ["--url", run.url],  # it finds the length that this server's speed wants
        lambda run: ["--url", run.url],
        writes_result=False,
    ),
    Step(
        "needle",
        lambda run: ["--url", run.url, *_needle_words(run)],
        lambda run: ["--url", run.url, *_needle_words(run), "--tokens", "300", "--depths", "0.5"],
        skip=_random_model,
    ),
    Step(
        "mixed_load",
        lambda run: ["--url", run.url, *_pid(run), *_minutes(run)],
        lambda run: [
            *("--url", run.url, "--minutes", "0.25", "--max-prompt", "512", "--max-output", "24"),
            *("--watch-s", "1", *_pid(run)),
        ],
    ),
    Step(
        "soak",
        lambda run: ["--url", run.url, *(_minutes(run) or ["--requests", "5000"])],
        # 1,000 ms: what a busy machine's scheduler does must not fail a check of what works
        lambda run: ["--url", run.url, "--requests", "150", "--health-ms", "1000"],
        writes_result=False,
    ),
    Step(
        "compare",
        lambda run: ["--a", run.url, "--b", run.url],
        lambda run: [
            *("--a", run.url, "--b", run.url, "--blocks", "2", "--prefill", "128", "--least-tokens", "24"),
            *("--max-loss", "1"),
        ],
    ),
    Step(
        "decode_kl",
        lambda run: ["--model", str(run.model), *PRECISIONS, *_kl_limits(run)],
        lambda run: [
            *("--model", str(run.model), *PRECISIONS, "--sequences", "2", "--tokens", "8"),
            *_kl_limits(run),
        ],
        skip=_no_model,
        needs_server=False,
    ),
)


class OwnServer:
    """A `glm53srv serve` process on a free port; its lines go to a file. Ended with SIGTERM."""

    def __init__(self, model: Path, flags: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "glm53srv", "serve", "--model", str(model), "--port", "0", *flags]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()
        self.process_id = self._process.pid

    def url_when_ready(self) -> str:
        """Wait for the model. Raises ServerDown with the last lines when the process ends instead."""
        seen: list[str] = []
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                continue
            if line is None:
                raise ServerDown(f"glm53srv serve ended at once: {' / '.join(seen[-3:])}")
            seen.append(line.strip())
            if found := READY.search(line):
                return found[1]
        raise ServerDown(f"glm53srv serve was not ready within {START_TIMEOUT_S:.0f} s")

    def stop(self) -> int:
        """End it; gives its exit code."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def _read(self, log: Path) -> None:
        assert self._process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in self._process.stdout:
                file.write(line)
                file.flush()
                self._lines.put(line)
        self._lines.put(None)


@dataclass(slots=True)
class ServerFacts:
    """What was seen of a server that was started here: its memory, and how it ended."""

    memory_at_ready: dict[str, int] = field(default_factory=dict)
    memory_at_end: dict[str, int] = field(default_factory=dict)
    exit_code: int = 0


@contextmanager
def a_server(options: argparse.Namespace, own: ServerFacts) -> Iterator[tuple[str, int | None]]:
    """Start a server, or take the one at --url; gives address and process id."""
    if options.url is not None:
        yield options.url, None
        return
    server = OwnServer(options.model, shlex.split(options.serve), options.out / "server.log")
    try:
        url = server.url_when_ready()
        own.memory_at_ready = process_memory(server.process_id)
        yield url, server.process_id
        own.memory_at_end = process_memory(server.process_id)
    finally:
        own.exit_code = server.stop()


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    steps = _chosen(options)
    for name in ("model", "out", "panel"):  # steps run in the repository's root
        path = getattr(options, name)
        setattr(options, name, None if path is None else path.expanduser().resolve())
    options.out.mkdir(parents=True, exist_ok=True)
    report = open_report(TOOL, argv, out=options.out / "summary.json")
    kernel_before = _kernel_log()
    panel = options.panel or _make_panel(options)
    own = ServerFacts()
    with a_server(options, own) as (url, process_id):
        kind = _kind(url)
        kinds = {"is_random": kind == "random", "is_demo": kind == "demo"}
        run = Run(
            options.model, url, options.out, panel, **kinds, process_id=process_id, minutes=options.minutes
        )
        outcomes = [run_step(step, run, is_short=options.short) for step in steps if step.needs_server]
    outcomes += [run_step(step, run, is_short=options.short) for step in steps if not step.needs_server]
    if own.exit_code != 0:
        reason = f"exit code {own.exit_code} at its end, see server.log"
        outcomes.append(Outcome("server", FAILED, reason=reason))
    report.result = {
        "is_short": options.short,
        "steps": [asdict(outcome) for outcome in outcomes],
        "server": asdict(own),
        "kernel_log": _new_lines(kernel_before, _kernel_log()),
    }
    return finish(report, outcomes, options.out / "summary.json")


def finish(report: Report, outcomes: Sequence[Outcome], path: Path) -> int:
    """Print and write the summary; gives the worst exit code, a failure before what was not measured."""
    rows = [
        [outcome.name, _word(outcome), f"{outcome.seconds:.0f}", outcome.reason or "-"]
        for outcome in outcomes
    ]
    close_report(report, path, table(["step", "outcome", "seconds", "why"], rows))
    codes = {outcome.code for outcome in outcomes if outcome.code is not None}
    if FAILED in codes:
        return FAILED
    return NOT_MEASURED if codes - {PASSED} else PASSED


def run_step(step: Step, run: Run, *, is_short: bool) -> Outcome:
    """Run one step as a command of its own; its lines go to the terminal and into a file."""
    reason = step.skip(run)
    if reason is not None:
        return Outcome(step.name, None, reason=reason)
    print(f"\n== {step.name}", flush=True)
    words = (step.short if is_short else step.full)(run)
    if step.writes_result:
        words += ["--out", str(run.out / f"{step.name}.json")]
    command = [sys.executable, str(REPOSITORY / "bench" / f"{step.name}.py"), *words]
    begin_s = time.monotonic()
    with (run.out / f"{step.name}.log").open("w", encoding="utf-8") as log:
        log.write(shlex.join(command) + "\n")
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                log.write(line)
                print(line, end="", flush=True)
        code = process.wait()
    return Outcome(step.name, code, round(time.monotonic() - begin_s, 1))


def _word(outcome: Outcome) -> str:
    words = {None: "left out", PASSED: "passed", FAILED: "FAILED", NOT_MEASURED: "not measured"}
    return words.get(outcome.code, f"ended with {outcome.code}")


def _chosen(options: argparse.Namespace) -> list[Step]:
    if options.model is None and options.url is None:
        raise BadInput("give --model DIR, or --url and --panel of a server that runs")
    if options.model is None and options.panel is None:
        raise BadInput("without --model no panel can be made: give --panel")
    return [step for step in STEPS if not options.only or step.name in options.only]


def _make_panel(options: argparse.Namespace) -> Path:
    path = options.out / "panel.json"
    command = [sys.executable, "-m", "glm53srv", "panel", "make", "--model", str(options.model)]
    command += ["--out", str(path), *(("--answer-tokens", "16") if options.short else ())]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"no panel could be made: {done.stderr.strip().splitlines()[-1:]}")
    print(done.stdout, end="", flush=True)
    return Path(path)


def _kind(url: str) -> str:
    """Tell which of this project's own small models is served: "random", "demo", or "" for any other."""
    try:
        info = Client(url, timeout_s=30.0).get("/model_info")
    except BenchError:
        return ""
    return "random" if info.get("is_random") else "demo" if info.get("is_demo") else ""


def _kernel_log() -> list[str] | None:
    """Give the kernel's log; None where it may not be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()


def _new_lines(before: list[str] | None, after: list[str] | None) -> Any:
    if before is None or after is None:
        return "could not be read"
    known = set(before)
    return [line for line in after if line not in known]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python3 -m bench.{TOOL}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, help="directory of the checkpoint")
    add("--url", help="a server that runs already; its memory is not watched")
    add("--serve", default="", help="flags for glm53srv serve, as one word")
    add("--panel", type=Path, help="a reference panel (default: made by the engine itself)")
    add("--out", type=Path, required=True, help="folder for results")
    add("--short", action="store_true", help="minutes in place of hours")
    add(
        "--minutes",
        type=float,
        help="of mixed load and of soak in the full form, in place of 30 and 5,000 requests",
    )
    add("--only", nargs="+", choices=[step.name for step in STEPS], help="these steps only")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
