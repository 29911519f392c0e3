"""Paired decode: how far one setting of the engine is from another, over the same forced tokens.

    python3 -m bench.decode_kl --model .models/random --a precision=exact32 --b precision=fast16

Runs in one process over this server's own engine (so it needs the package, not the standard library alone).
Setting A answers each prompt greedily; then A again and B are given A's tokens one by one through the decode
path, and what they say of every next token is compared with A's first pass: KL(A || B) over A's most likely
20 tokens and the rest as one. A against A is the control, and must be 0. A settings word is any option of
`glm53srv serve` by its long name, --a and --b may be given several times.

Exit code 0: within the thresholds; 1: not; 2: could not be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.errors import BadInput, BenchError
from bench.panel_score import Logprobs, Score, load_panel, score_position, summarise
from bench.report import (
    Check,
    Progress,
    add_output_flags,
    close_report,
    open_report,
    run_command,
    table,
)
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.config import EngineConfig, load_config
from glm53srv.engine.base import Engine
from glm53srv.engine.drive import EngineDriver
from glm53srv.engine.factory import load_engine
from glm53srv.errors import Glm53Error
from glm53srv.machine import read_machine
from glm53srv.panel_texts import default_texts
from glm53srv.request import TokenLogprobs

TOOL = "decode_kl"
TOP = 20


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that decode together. forced: by sequence, the tokens that every setting is given."""

    prompts: tuple[tuple[int, ...], ...]
    forced: tuple[tuple[int, ...], ...]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    report = open_report(TOOL, argv, out=options.out)
    progress = Progress(None if options.quiet else sys.stderr)
    try:
        configs = [_config(options, words) for words in (options.a, options.b)]
        prompts = _prompts(options)
        groups, first, control = run_reference(configs[0], prompts, options, progress)
        other = run_forced(configs[1], groups, progress, "B")
    except Glm53Error as error:
        raise BenchError(str(error)) from error
    scores = {"A against A": compare(first, control), "A against B": compare(first, other)}
    report.result = {
        "a": options.a,
        "b": options.b,
        "streams": options.streams,
        "sequences": len(prompts),
        **{name.replace(" ", "_").lower(): asdict(score) for name, score in scores.items()},
    }
    difference, same = scores["A against B"], scores["A against A"]
    report.checks += [
        Check("control: largest KL of A against A", same.max_kl, 0.0),
        Check("mean KL in nats", difference.mean_kl, options.max_kl),
        Check("top-1 agreement", difference.top1, options.min_top1, at_least=True),
    ]
    if difference.positions < 1000:
        report.notes.append(f"only {difference.positions} positions; a p99 wants 1,000 or more")
    return close_report(report, options.out, _table(scores))


def run_reference(
    config: EngineConfig, prompts: Sequence[tuple[int, ...]], options: argparse.Namespace, progress: Progress
) -> tuple[list[Group], list[Logprobs], list[Logprobs]]:
    """Run setting A twice: free, which makes the tokens to force, and forced.

    Gives the groups, and the log probabilities of both passes, in the same order of positions.
    """
    groups: list[Group] = []
    free: list[Logprobs] = []
    with opened(config) as engine:
        for begin in range(0, len(prompts), options.streams):
            batch = tuple(prompts[begin : begin + options.streams])
            tokens, told = decode_group(engine, batch, options.tokens, greedy_token)
            groups.append(Group(batch, tokens))
            free += told
            progress(f"A, free: {begin + len(batch)} of {len(prompts)} sequences")
        return groups, free, _forced_pass(engine, groups, progress, "A again")


def run_forced(
    config: EngineConfig, groups: Sequence[Group], progress: Progress, name: str
) -> list[Logprobs]:
    """Run a setting over forced tokens; gives the log probabilities after each of them, in order."""
    with opened(config) as engine:
        return _forced_pass(engine, groups, progress, name)


def _forced_pass(engine: Engine, groups: Sequence[Group], progress: Progress, name: str) -> list[Logprobs]:
    told: list[Logprobs] = []
    for number, group in enumerate(groups):

        def forced_token(row: int, step: int, said: Logprobs, group: Group = group) -> int:
            return group.forced[row][step]

        told += decode_group(engine, group.prompts, len(group.forced[0]), forced_token)[1]
        progress(f"{name}: {number + 1} of {len(groups)} groups")
    return told


Choice = Callable[[int, int, Logprobs], int]
"""Chooses the token to go on with: by row, step, and what the engine said."""


def greedy_token(row: int, step: int, said: Logprobs) -> int:
    """Go on with the most likely token; the end of a turn is no end here, so that all rows stay together."""
    return next(iter(said))


def decode_group(
    engine: Engine, prompts: Sequence[tuple[int, ...]], num_tokens: int, choose: Choice
) -> tuple[tuple[tuple[int, ...], ...], list[Logprobs]]:
    """Decode sequences together; gives the tokens that were put in, and what followed each, step by step.

    What the prefill says of the first token is left out: only decode steps are compared.
    """
    driver = EngineDriver(engine)
    said = [_listed(row[-1]) for row in driver.open(prompts, num_top=TOP, room_tokens=num_tokens)]
    rows: list[list[int]] = [[] for _ in prompts]
    told: list[Logprobs] = []
    for step in range(num_tokens):
        tokens = [choose(row, step, said[row]) for row in range(len(prompts))]
        said = [_listed(token.logprobs) for token in driver.decode(tokens)]
        told += said
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
    driver.release()
    return tuple(tuple(row) for row in rows), told


def compare(first: Sequence[Logprobs], second: Sequence[Logprobs]) -> Score:
    """Compare two passes position by position."""
    return summarise([score_position(a, b) for a, b in zip(first, second, strict=True)])


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    """Load an engine, and close it. One at a time: the weights of two may not fit."""
    engine = load_engine(config, read_machine(), lambda fraction, stage: None)
    try:
        yield engine
    finally:
        engine.close()


def _listed(logprobs: TokenLogprobs | None) -> Logprobs:
    assert logprobs is not None  # they were asked for
    return dict(logprobs.top)


def _config(options: argparse.Namespace, words: Sequence[str]) -> EngineConfig:
    argv = ["--model", str(options.model), "--max-streams", str(options.streams)]
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"{word!r} is no setting; write name=value, as precision=fast16")
        argv.append(f"--{name.replace('_', '-')}={value}")
    return load_config(argv).engine


def _prompts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    if options.panel is not None:
        entries = load_panel(options.panel).entries
        prompts = [entry.ids[: entry.num_prompt or (len(entry.ids) + 1) // 2] for entry in entries]
    else:
        prompts = [text.ids for text in default_texts(Tokenizer.load(options.model))]
    return prompts[: options.sequences]


def _table(scores: dict[str, Score]) -> str:
    rows = [
        [name, score.positions, f"{score.top1:.4f}"]
        + [f"{kl:.3g}" for kl in (score.mean_kl, score.p99_kl, score.max_kl)]
        for name, score in scores.items()
    ]
    return table(["settings", "positions", "top-1", "mean KL", "p99 KL", "max KL"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python3 -m bench.{TOOL}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--a", action="append", default=[], help="a setting of the reference, name=value")
    parser.add_argument("--b", action="append", default=[], help="a setting of the other side, name=value")
    parser.add_argument("--panel", type=Path, help="take the prompts of this panel, not the built-in chats")
    parser.add_argument("--sequences", type=int, default=8, help="at most so many prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="sequences decoded together (%(default)s)")
    parser.add_argument(
        "--max-kl", type=float, default=0.01, help="largest good mean divergence in nats (%(default)s)"
    )
    parser.add_argument(
        "--min-top1", type=float, default=0.95, help="smallest good share of equal top tokens (%(default)s)"
    )
    add_output_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
