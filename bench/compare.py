"""Compare two servers, or two results of the sweep, and say what of the difference is more than noise.

    python3 -m bench.compare --a http://127.0.0.1:30000 --b http://127.0.0.1:30001 --blocks 5
    python3 -m bench.compare --a sweep-old.json --b sweep-new.json

Servers are measured in the order A B B A, block after block, so that a machine that slowly drifts favours
neither; each block gives one ratio, B to A, of its two means. Files were measured at two times, which no
order can mend: a ratio of their medians says less. A ratio is called a difference when 1 lies outside its
range (least to largest over the blocks, or what the files' least and largest values allow) and when it is
further from 1 than --noise and than two runs of the same server in one block typically are from each other.
Chance alone puts all of n blocks on one side once in 2^(n-1) runs, so few blocks prove little. Ratios are
turned so that above 1 always means that B is better.

A chat is 128 tokens (--least-tokens), or on a fast server as many as take half a second: a shorter one would
time the machine's scheduler. --max-tokens sets a length that is kept.

Exit code 0: no metric of B is worse beyond noise by more than --max-loss; 1: one is; 2: not measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import measure
from bench.client import Client
from bench.errors import BadInput
from bench.facts import server_facts
from bench.report import (
    Check,
    Progress,
    add_output_flags,
    close_report,
    open_report,
    read_result,
    run_command,
    table,
)

TOOL = "compare"
ORDER = "ABBA"
CHAT_SECONDS = 0.5
MAX_TRIES = 4


@dataclass(frozen=True, slots=True)
class Ratio:
    """B to A of one metric, above 1 where B is better.

    low, high: its range. own_noise: how far apart two runs of one server are, as a share; the median over
    sides and blocks.
    """

    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    runs: int
    own_noise: float = 0.0

    def verdict(self, noise: float) -> str:
        """Say whether it is a difference: 1 lies outside the range, and the ratio outside the noise."""
        factor = 1.0 + max(noise, self.own_noise)
        if self.low > 1.0 and self.ratio > factor:
            return "better"
        if self.high < 1.0 and self.ratio < 1.0 / factor:
            return "worse"
        return "same"


def ratio_of_blocks(
    metric: str, blocks: Sequence[dict[str, list[float]]], *, higher_is_better: bool = True
) -> Ratio:
    """Make the ratio of blocks, each with the values of "A" and "B": one ratio per block, their median."""
    ratios = []
    for block in blocks:
        a, b = statistics.mean(block["A"]), statistics.mean(block["B"])
        ratios.append(b / a if higher_is_better else a / b)
    return Ratio(
        metric=metric,
        a=statistics.median([value for block in blocks for value in block["A"]]),
        b=statistics.median([value for block in blocks for value in block["B"]]),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        runs=sum(len(block["A"]) + len(block["B"]) for block in blocks),
        own_noise=statistics.median(
            max(runs) / min(runs) - 1.0 for block in blocks for runs in block.values()
        ),
    )


def ratio_of_metrics(name: str, a: dict[str, Any], b: dict[str, Any]) -> Ratio:
    """Make the ratio of two metrics of the sweep; its range is what their least and largest values allow."""
    if a.get("better", "higher") == "higher":
        ratio, low, high = b["median"] / a["median"], b["min"] / a["max"], b["max"] / a["min"]
    else:
        ratio, low, high = a["median"] / b["median"], a["min"] / b["max"], a["max"] / b["min"]
    return Ratio(name, a["median"], b["median"], ratio, low, high, len(a["all"]) + len(b["all"]))


def compare_files(path_a: Path, path_b: Path) -> tuple[list[Ratio], list[str]]:
    """Compare two results of the sweep; gives ratios, and what speaks against comparing them."""
    documents = [read_result(path, "sweep") for path in (path_a, path_b)]
    metrics_a, metrics_b = (document["result"]["metrics"] for document in documents)
    shared = [name for name in metrics_a if name in metrics_b]
    if not shared:
        raise BadInput(f"{path_a} and {path_b} have no metric in common")
    notes = ["measured at two times: drift of the machine is in the ratios"]
    notes += [
        f"{key} differs: {documents[0]['machine'].get(key)} and {documents[1]['machine'].get(key)}"
        for key in ("cpu", "gpus", "cpus_usable")
        if documents[0]["machine"].get(key) != documents[1]["machine"].get(key)
    ]
    return [ratio_of_metrics(name, metrics_a[name], metrics_b[name]) for name in shared], notes


def compare_servers(
    benches: dict[str, measure.Bench], options: argparse.Namespace, progress: Progress
) -> tuple[list[Ratio], dict[str, Any]]:
    """Measure two servers in turn; gives ratios, and all values with the tokens of each chat."""
    for bench in benches.values():
        bench.prompt(bench.random_ids(min(512, bench.context_tokens // 2)), 1)  # warm up
    max_tokens = options.max_tokens
    if max_tokens is None and options.conc:  # as the faster one wants, the same for both
        max_tokens = max(
            lasting_tokens(_chat_seconds(each), options.least_tokens, each.context_tokens)
            for each in benches.values()
        )
        progress(f"chats of {max_tokens} tokens")
    measures: dict[str, Callable[[measure.Bench, int], float]] = {
        f"prefill {num}": _prefill_rate(num) for num in options.prefill
    }
    for num_streams in options.conc:
        measures[f"decode C{num_streams}"] = _decode_rate(num_streams, max_tokens)
    ratios, raw = [], {}
    for name, run in measures.items():
        blocks = []
        for number in range(options.blocks):
            block: dict[str, list[float]] = {"A": [], "B": []}
            for at, side in enumerate(ORDER):
                block[side].append(run(benches[side], (number * len(ORDER) + at) * 100))
            blocks.append(block)
            progress(f"{name}, block {number + 1}: A {_shown(block['A'])}  B {_shown(block['B'])} tok/s")
        ratios.append(ratio_of_blocks(name, blocks))
        raw[name] = blocks
    return ratios, {"max_tokens": max_tokens, "blocks": raw}


def lasting_tokens(seconds_of: Callable[[int], float], least_tokens: int, context_tokens: int) -> int:
    """Find how long a chat must be to take CHAT_SECONDS: least_tokens or more, half of the context at most.

    seconds_of: runs a chat of so many tokens and gives the seconds that these took.
    """
    num_tokens = min(least_tokens, context_tokens // 2)
    for _ in range(MAX_TRIES):
        seconds = seconds_of(num_tokens)
        if seconds >= CHAT_SECONDS or num_tokens == context_tokens // 2:
            break
        # a fifth more: a server that is warm by now is faster still
        wanted = math.ceil(num_tokens * 1.2 * CHAT_SECONDS / max(seconds, 1e-3))
        num_tokens = min(wanted, context_tokens // 2)
    return num_tokens


def _chat_seconds(bench: measure.Bench) -> Callable[[int], float]:
    def seconds(num_tokens: int) -> float:
        # a number that no block uses
        done = measure.decode_round(bench, 1, -num_tokens, num_tokens, ignore_eos=True)
        return sum(done.completion_tokens) / done.after_first

    return seconds


def _prefill_rate(num_tokens: int) -> Callable[[measure.Bench, int], float]:
    return lambda bench, _: num_tokens / measure.prefill_run(bench, num_tokens)


def _decode_rate(num_streams: int, max_tokens: int) -> Callable[[measure.Bench, int], float]:
    """Answers are all equally long, past natural ends: their lengths would be noise."""

    def rate(bench: measure.Bench, number: int) -> float:
        return measure.decode_round(bench, num_streams, number, max_tokens, ignore_eos=True).after_first

    return rate


def _shown(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    progress = Progress(None if options.quiet else sys.stderr)
    are_files = [Path(side).is_file() for side in (options.a, options.b)]
    if any(are_files) and not all(are_files):
        raise BadInput("--a and --b must both be files or both be addresses of servers")
    report = open_report(TOOL, argv, out=options.out, secret=options.api_key)
    if all(are_files):
        ratios, notes = compare_files(Path(options.a), Path(options.b))
        report.notes += notes
    else:
        benches, pages = {}, {}
        for side, url in (("A", options.a), ("B", options.b)):
            client = Client(url, api_key=options.api_key, timeout_s=options.timeout_s)
            pages[side] = server_facts(client)
            benches[side] = measure.Bench.open(client, pages[side], template="server", id_range=None)
        report.server_before = pages
        ratios, values = compare_servers(benches, options, progress)
        report.result |= values
    report.result["ratios"] = [asdict(ratio) | {"verdict": ratio.verdict(options.noise)} for ratio in ratios]
    report.checks += [
        Check(f"{ratio.metric}: B to A", ratio.ratio, 1.0 - options.max_loss, at_least=True)
        for ratio in ratios
        if ratio.verdict(options.noise) == "worse"
    ]
    return close_report(report, options.out, _table(ratios, options.noise))


def _table(ratios: Sequence[Ratio], noise: float) -> str:
    rows = [
        [
            ratio.metric,
            *(f"{value:.2f}" for value in (ratio.a, ratio.b)),
            f"{ratio.ratio:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            f"{ratio.own_noise:.3f}",
            ratio.runs,
            ratio.verdict(noise),
        ]
        for ratio in ratios
    ]
    return table(["metric", "A", "B", "B to A", "range", "own noise", "runs", "B is"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python3 -m bench.{TOOL}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--a", required=True, help="address of a server, or a result of the sweep")
    add("--b", required=True, help="the other one, of the same kind")
    add("--api-key", help="sent to both servers as a bearer token")
    add("--timeout-s", type=float, default=1800.0, help="longest silence of a server (%(default)s)")
    add("--blocks", type=int, default=5, help="A B B A blocks of each measurement (%(default)s)")
    add("--prefill", type=int, nargs="*", default=[2048], help="prompt lengths (2048)")
    add("--conc", type=int, nargs="*", default=[1], help="streams at once (1)")
    add(
        "--least-tokens",
        type=int,
        default=128,
        help="of each chat; more where these take less than 0.5 s (%(default)s)",
    )
    add("--max-tokens", type=int, help="of each chat, however long it takes")
    add("--noise", type=float, default=0.02, help="ratios nearer to 1 than this are the same (%(default)s)")
    add("--max-loss", type=float, default=0.05, help="largest loss that still passes (%(default)s)")
    add_output_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
