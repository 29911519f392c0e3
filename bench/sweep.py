"""Measure a server's speed: prefill, decode with 1, 2, 4 streams, time to first token, turns, interference.

    python3 -m bench.sweep --url http://127.0.0.1:30000 --card rtx3090 --config "v0.2 fast" --out sweep.json

prefill     fresh prompts of random tokens, tokens / time to first token, median of --reps
first token the same for short prompts, in ms
decode      --conc chats at once, greedy to their natural end; all completion tokens / time, median of
            --dec-reps rounds. "after first" counts the time from the first token on, as the published
            sweeps of this model do; the plain figure counts from the first request on
deep        one stream behind a prompt of --deep tokens
second turn the same prompt again with its answer and 96 new tokens
beside      one stream while another client's prompt of --beside tokens is read

With --best FILE (JSON: card -> metric -> value) a metric worse than the best known by more than --tolerance
ends the sweep there, unless --no-early-exit.

Exit code 0: done, all checks passed; 1: not; 2: could not be measured.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import measure
from bench.errors import BadInput, BenchError
from bench.facts import server_facts
from bench.report import (
    Check,
    Progress,
    Report,
    client_of,
    client_parser,
    close_report,
    open_report,
    run_command,
    spread,
    table,
)

TOOL = "sweep"
WARM_UP_TOKENS = 512
NEW_TOKENS = 96
TURN_TOKENS = 16
ALONE_TOKENS = 16


class BelowBest(Exception):
    """A metric is below the best known one; the sweep ends."""


@dataclass(slots=True)
class Sweep:
    """A sweep in the making. metrics: by name, unit and values; rounds: everything that was seen."""

    bench: measure.Bench
    options: argparse.Namespace
    report: Report
    progress: Progress
    best: dict[str, float]
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: dict[str, list[Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Measure everything; what was measured stays when a metric ends it early."""
        bench = self.bench
        warm_up = min(WARM_UP_TOKENS, bench.context_tokens // 2)
        bench.prompt(bench.random_ids(warm_up), 1)
        before, seen = server_facts(bench.client), (bench.sent - bench.cached, bench.received)
        try:
            self._prefills()
            self._decodes()
            self._second_turns()
            self._counters(before, seen)
            self._beside()
        except BelowBest as error:
            self.report.notes.append(f"ended early: {error}")

    def _prefills(self) -> None:
        for num_tokens in [*self.options.ttft, *self.options.prefill]:
            if not self._fits(num_tokens):
                continue
            seconds = [measure.prefill_run(self.bench, num_tokens) for _ in range(self.options.reps)]
            if num_tokens in self.options.ttft:
                self._add(f"first token after {num_tokens}", "ms", [1000 * each for each in seconds], "lower")
            if num_tokens in self.options.prefill:
                self._add(f"prefill {num_tokens}", "tok/s", [num_tokens / each for each in seconds])

    def _decodes(self) -> None:
        number = 0
        for num_streams in self.options.conc:
            rounds = []
            for _ in range(self.options.dec_reps):
                rounds.append(measure.decode_round(self.bench, num_streams, number, self.options.max_tokens))
                number += num_streams
            name = f"decode C{num_streams}"
            self.rounds[name] = [asdict(each) for each in rounds]
            self._add(name, "tok/s", [each.aggregate for each in rounds])
            self._add(f"{name} after first", "tok/s", [each.after_first for each in rounds])
            streams = [rate for each in rounds for rate in each.per_stream]
            if streams:
                self._add(f"{name} per stream", "tok/s", streams)
            if self.options.max_tokens is not None:
                continue
            cut = sum(finish == "length" for each in rounds for finish in each.finishes)
            if cut:
                self.report.notes.append(f"{name}: {cut} streams ended at the context, not naturally")
        if self.options.deep and self._fits(self.options.deep + self.options.deep_tokens):
            runs = [
                measure.deep_decode_run(self.bench, self.options.deep, self.options.deep_tokens)
                for _ in range(self.options.dec_reps)
            ]
            self._add(f"decode C1 at {self.options.deep}", "tok/s", [rate for rate in runs if rate])

    def _second_turns(self) -> None:
        num_tokens = self.options.turn
        if not num_tokens or not self._fits(num_tokens + NEW_TOKENS + 2 * TURN_TOKENS):
            return
        runs = [
            measure.second_turn_run(self.bench, num_tokens, NEW_TOKENS, TURN_TOKENS)
            for _ in range(self.options.dec_reps)
        ]
        name = f"turn of {num_tokens}"
        self.rounds[name] = runs
        self._add(f"{name}, first", "ms", [1000 * run["first_turn_s"] for run in runs], "lower")
        self._add(f"{name}, second", "ms", [1000 * run["second_turn_s"] for run in runs], "lower")

    def _beside(self) -> None:
        num_tokens = self.options.beside
        if not num_tokens or not self._fits(num_tokens):
            return
        try:
            runs = [
                measure.beside_run(self.bench, num_tokens, ALONE_TOKENS) for _ in range(self.options.dec_reps)
            ]
        except BenchError as error:
            self.report.notes.append(f"beside a prompt of {num_tokens}: {error}")
            return
        name = f"beside prefill {num_tokens}"
        self.rounds[name] = runs
        self._add(f"{name}, alone", "tok/s", [run["alone_tok_s"] for run in runs])
        self._add(f"{name}, during", "tok/s", [run["during_prefill_tok_s"] for run in runs])
        self._add(f"{name}, longest gap", "ms", [1000 * run["longest_gap_s"] for run in runs], "lower")

    def _counters(self, before: dict[str, Any], seen: tuple[int, int]) -> None:
        """Hold what this client counted against the server's own counters and clocks."""
        after = server_facts(self.bench.client)
        counted = (self.bench.sent - self.bench.cached - seen[0], self.bench.received - seen[1])
        limit = self.options.max_disagreement
        for name, key, own in (
            ("prompt tokens", "total_prefill_tokens", counted[0]),
            ("output tokens", "total_output_tokens", counted[1]),
        ):
            then, now = (_counter(pages, key) for pages in (before, after))
            if then is None or now is None:
                self.report.notes.append(f"{name}: the server has no counter in /stats to compare with")
                continue
            self.report.checks.append(
                Check(
                    f"{name}: {own} here, {now - then} by the server; apart by",
                    _apart(own, now - then),
                    limit,
                )
            )
        own_rates = [rate for each in self.rounds.get("decode C1", []) for rate in each["per_stream"]]
        rates = [rate for each in self.rounds.get("decode C1", []) for rate in each["server_per_stream"]]
        if rates and len(rates) == len(own_rates):
            own_rate, rate = sum(own_rates) / len(rates), sum(rates) / len(rates)
            self.report.checks.append(
                Check(
                    f"decode C1: {own_rate:.2f} tok/s here, {rate:.2f} by the server; apart by",
                    _apart(own_rate, rate),
                    self.options.max_clock_disagreement,
                )
            )

    def _fits(self, num_tokens: int) -> bool:
        if self.bench.fits(num_tokens):
            return True
        note = f"{num_tokens} tokens do not fit into the context of {self.bench.context_tokens}: left out"
        if note not in self.report.notes:
            self.report.notes.append(note)
            self.progress(note)
        return False

    def _add(self, name: str, unit: str, values: Sequence[float], better: str = "higher") -> None:
        if not values:
            return
        metric = spread([round(value, 4) for value in values]) | {"unit": unit, "better": better}
        self.metrics[name] = metric
        self.progress(f"{name}: {metric['median']:.2f} {unit} ({metric['min']:.2f} to {metric['max']:.2f})")
        best = self.best.get(name)
        if best is None:
            return
        limit = best * (1.0 - self.options.tolerance if better == "higher" else 1.0 + self.options.tolerance)
        check = Check(f"{name}, best known {best:g}:", metric["median"], limit, at_least=better == "higher")
        self.report.checks.append(check)
        if not check.passed and not self.options.no_early_exit:
            raise BelowBest(check.line())


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    best = _read_best(options.best, options.card)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib, which is not installed")
    client = client_of(options)
    report = open_report(TOOL, argv, client, out=options.out, secret=options.api_key)
    ids = None if options.ids is None else (options.ids[0], options.ids[1])
    bench = measure.Bench.open(client, report.server_before or {}, template=options.template, id_range=ids)
    sweep = Sweep(bench, options, report, Progress(None if options.quiet else sys.stderr), best)
    sweep.run()
    report.result = {
        "card": options.card,
        "config": options.config,
        "template": options.template,
        "max_tokens": options.max_tokens,
        "prompts_through": bench.prompter_name,
        "context_tokens": bench.context_tokens,
        "metrics": sweep.metrics,
        "rounds": sweep.rounds,
    }
    if options.max_tokens is not None:
        report.notes.append(f"answers were cut at {options.max_tokens} tokens: no natural ends")
    if options.plot is not None:
        _plot(sweep.metrics, options.plot, f"{options.card} {options.config}")
    return close_report(report, options.out, _table(sweep.metrics), client)


def _apart(own: float, other: float) -> float:
    return abs(own - other) / max(own, other, 1e-9)


def _counter(pages: dict[str, Any], key: str) -> int | None:
    value = ((pages.get("stats") or {}).get("scheduler") or {}).get(key)
    return value if isinstance(value, int) else None


def _read_best(path: Path | None, card: str) -> dict[str, float]:
    if path is None:
        return {}
    try:
        table_of_cards = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in table_of_cards.get(card, {}).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadInput(f"--best {path}: {error}") from error


def _table(metrics: dict[str, dict[str, Any]]) -> str:
    rows = [
        [name, metric["unit"]]
        + [f"{metric[key]:.2f}" for key in ("median", "min", "max")]
        + [len(metric["all"])]
        for name, metric in metrics.items()
    ]
    return table(["metric", "unit", "median", "min", "max", "runs"], rows)


def _plot(metrics: dict[str, dict[str, Any]], path: Path, title: str) -> None:
    figures: Any = importlib.import_module("matplotlib.figure")
    shown = {name: metric for name, metric in metrics.items() if metric["unit"] == "tok/s"}
    figure = figures.Figure(figsize=(9, 1 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    medians = [metric["median"] for metric in shown.values()]
    below = [metric["median"] - metric["min"] for metric in shown.values()]
    above = [metric["max"] - metric["median"] for metric in shown.values()]
    axes.barh(list(shown), medians, xerr=[below, above])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("tokens per second, median with least and largest")
    axes.set_title(title)
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = client_parser(TOOL, __doc__)
    add = parser.add_argument
    add("--card", default="unnamed", help="name of the hardware, key of --best")
    add("--config", default="", help="label of the setting: commit, mode, flags")
    add(
        "--template",
        choices=("server", "glm"),
        default="server",
        help="chats by the server's template, or in GLM's format without thinking, through /generate",
    )
    add("--prefill", type=int, nargs="*", default=[8192, 32768], help="prompt lengths (8192 32768)")
    add("--ttft", type=int, nargs="*", default=[96, 256, 1024], help="short prompt lengths (96 256 1024)")
    add("--conc", type=int, nargs="*", default=[1, 2, 4], help="streams at once (1 2 4)")
    add("--reps", type=int, default=3, help="runs of each prefill (%(default)s)")
    add("--dec-reps", type=int, default=2, help="rounds of everything else (%(default)s)")
    add("--max-tokens", type=int, help="cut the chats here; default: their natural end")
    add("--deep", type=int, default=32768, help="prompt before the deep decode, 0: none (%(default)s)")
    add("--deep-tokens", type=int, default=256, help="tokens of the deep decode (%(default)s)")
    add("--turn", type=int, default=8192, help="prompt of the first turn, 0: none (%(default)s)")
    add("--beside", type=int, default=65536, help="prompt beside a stream, 0: none (%(default)s)")
    add("--ids", type=int, nargs=2, metavar=("LOW", "HIGH"), help="token ids to draw, half open")
    add("--best", type=Path, help="best known values")
    add("--tolerance", type=float, default=0.05, help="how far below the best is good (%(default)s)")
    add("--no-early-exit", action="store_true", help="go on below the best known value")
    add(
        "--max-disagreement",
        type=float,
        default=0.02,
        help="largest share by which the server's counters may differ (%(default)s)",
    )
    add(
        "--max-clock-disagreement",
        type=float,
        default=0.02,
        help="the same for the decode rate by the server's own clock (%(default)s)",
    )
    add("--plot", type=Path, help="draw a picture here (needs matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
