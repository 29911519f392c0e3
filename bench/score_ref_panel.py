"""Score a server against a reference panel: teacher-forced top-1 agreement and KL divergence.

    python3 -m bench.score_ref_panel --url http://127.0.0.1:30000 --panel panel.json --out score.json

Needs POST /generate with return_logprob, as SGLang has it: the panel's tokens go in as a prompt, and the log
probabilities of every prompt token come back. No token is sampled, so the decode path is not tested: for
that see decode_kl. Where the panel holds chat requests, the server's own rendering of them (POST /tokenize
with messages) must give the panel's tokens; if it gives others, those are what is scored.

Exit code 0: within the thresholds; 1: not; 2: could not be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    # In place of bench/, whose profile.py hides Python's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.client import Client
from bench.errors import BenchError, ServerDown, ServerRefused
from bench.panel_score import (
    Logprobs,
    Panel,
    PanelEntry,
    PositionScore,
    load_panel,
    score_position,
    summarise,
)
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

TOOL = "score_ref_panel"
CANNOT = "the server cannot return log probabilities of a prompt"


@dataclass(frozen=True, slots=True)
class EntryScore:
    """One sequence scored. misplaced: prompt tokens that came back as others.

    has_own_prompt: the server rendered the chat request into other tokens than the panel's; None where it
    has no /tokenize to ask, or there is no chat.
    """

    name: str
    scores: tuple[PositionScore, ...]
    misplaced: int
    has_own_prompt: bool | None


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    panel = load_panel(options.panel)
    client = client_of(options)
    report = open_report(TOOL, argv, client, out=options.out, secret=options.api_key)
    progress = Progress(None if options.quiet else sys.stderr)
    entries = score_panel(client, panel, progress)
    total = summarise([score for entry in entries for score in entry.scores])
    report.result = {
        "panel": {"file": str(options.panel), "engine": panel.engine, "positions": panel.num_positions},
        "total": asdict(total),
        "entries": [_entry_result(entry) for entry in entries],
    }
    report.checks += [
        Check("top-1 agreement", total.top1, options.min_top1, at_least=True),
        Check("mean KL in nats", total.mean_kl, options.max_kl),
        Check("prompt tokens that came back as others", sum(entry.misplaced for entry in entries), 0),
        Check("chats rendered into other tokens", sum(entry.has_own_prompt is True for entry in entries), 0),
    ]
    if (limit := options.max_logprob_error) is not None:
        report.checks.append(Check("mean log probability error in nats", total.logprob_error, limit))
    num_chats = sum(entry.chat is not None for entry in panel.entries)
    num_unasked = num_chats - sum(entry.has_own_prompt is not None for entry in entries)
    if num_unasked:
        report.notes.append(
            f"the server renders no chats on request: its template was not checked on {num_unasked}"
        )
    if total.unlisted:
        report.notes.append(
            f"{total.unlisted} of {total.positions * panel.top} reference tokens were not among those that "
            "the server listed; each counts as likely as the least likely listed one"
        )
    return close_report(report, options.out, _table(entries), client)


def score_panel(client: Client, panel: Panel, progress: Progress) -> list[EntryScore]:
    """Score every entry. Raises BenchError: what the server cannot do."""
    entries = []
    for number, entry in enumerate(panel.entries):
        scored = score_entry(client, entry, panel.top)
        entries.append(scored)
        score = summarise(scored.scores)
        progress(
            f"{number + 1}/{len(panel.entries)} {entry.name}: {score.positions} positions, "
            f"top-1 {score.top1:.4f}, KL {score.mean_kl:.6f}"
        )
    return entries


def score_entry(client: Client, entry: PanelEntry, top: int) -> EntryScore:
    """Score one sequence, behind the prompt that the server makes of its chat request."""
    prompt = entry.ids[: entry.num_prompt]
    rendered = _rendered(client, entry)
    own = prompt if rendered is None else rendered
    offset = len(own) - len(prompt)
    ids = own + entry.ids[len(prompt) :]
    # behind another prompt only the answer's tokens have a counterpart; the first is judged one before it
    first_kept = 0 if own == prompt else len(prompt) - 1
    wanted = {
        position + offset: logprobs
        for position, logprobs in entry.reference.items()
        if position >= first_kept
    }
    if not wanted:
        raise BenchError(f"{entry.name}: no position behind the chat's prompt to score")
    served, misplaced = served_logprobs(client, ids, sorted(wanted), top)
    scores = tuple(score_position(wanted[position], served[position]) for position in sorted(wanted))
    return EntryScore(entry.name, scores, misplaced, None if rendered is None else own != prompt)


def served_logprobs(
    client: Client, ids: Sequence[int], positions: Sequence[int], top: int
) -> tuple[dict[int, Logprobs], int]:
    """Ask for the most likely ids after each position of a sequence.

    positions: ascending. Gives them by position, and how many prompt tokens the server named wrongly. Raises
    BenchError when the answer does not hold them.
    """
    first, last = positions[0], positions[-1]
    prompt = list(ids[: last + 2])  # the token after the last position, if there is one, is judged with it
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": first,
        "top_logprobs_num": top,
    }
    meta = _generate(client, body).get("meta_info", {})
    tokens, tops = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    count = len(prompt) - first
    if (
        not isinstance(tokens, list)
        or not isinstance(tops, list)
        or len(tokens) != count
        or len(tops) != count
    ):
        raise BenchError(
            f"{CANNOT}: wanted {count} of them, its answer has {_length(tokens)}/{_length(tops)}"
        )
    lists = dict(enumerate(tops, start=first - 1))  # the list of token i judges position i - 1
    if last == len(prompt) - 1:
        lists[last] = (meta.get("output_top_logprobs") or [None])[0]
    misplaced = sum(item[1] != token for item, token in zip(tokens, prompt[first:], strict=True))
    return {position: _as_logprobs(lists[position], position) for position in positions}, misplaced


def _generate(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = client.post("/generate", body)
    except ServerDown:
        raise
    except ServerRefused as error:
        if error.status in (404, 405, 501):
            raise BenchError(f"{CANNOT}: it has no /generate ({error})") from error
        raise BenchError(f"the panel does not fit this server: {error}") from error
    if not isinstance(answer, dict):
        raise BenchError(f"{CANNOT}: /generate answered {str(answer)[:100]}")
    return answer


def _as_logprobs(items: object, position: int) -> Logprobs:
    if not isinstance(items, list) or not items:
        raise BenchError(f"{CANNOT}: nothing for the token after position {position}")
    return {int(item[1]): float(item[0]) for item in items}


def _length(value: object) -> str:
    return str(len(value)) if isinstance(value, list) else "none"


def _rendered(client: Client, entry: PanelEntry) -> tuple[int, ...] | None:
    """Give the tokens of the server's own rendering; None where there is no chat or no way to ask."""
    if entry.chat is None:
        return None
    try:
        answer = client.post("/tokenize", dict(entry.chat))
    except ServerRefused as error:
        if error.status in (404, 405, 501):
            return None
        raise
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tuple(tokens) if tokens else None  # some servers tokenize a text only, and find none here


def _entry_result(entry: EntryScore) -> dict[str, Any]:
    return {
        "name": entry.name,
        **asdict(summarise(entry.scores)),
        "misplaced": entry.misplaced,
        "has_own_prompt": entry.has_own_prompt,
    }


def _table(entries: Sequence[EntryScore]) -> str:
    rows = []
    named = [(entry.name, entry.scores) for entry in entries]
    total = tuple(score for entry in entries for score in entry.scores)
    for name, scores in [*named, ("all", total)]:
        score = summarise(scores)
        rows.append(
            [name, score.positions, f"{score.top1:.4f}"]
            + [f"{kl:.6f}" for kl in (score.mean_kl, score.p99_kl, score.max_kl)]
            + [f"{score.logprob_error:.4f}"]
        )
    return table(["text", "positions", "top-1", "mean KL", "p99 KL", "max KL", "log p error"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = client_parser(TOOL, __doc__)
    parser.add_argument("--panel", type=Path, required=True, help="the panel file")
    parser.add_argument(
        "--min-top1", type=float, default=0.99, help="smallest good share of equal top tokens (%(default)s)"
    )
    parser.add_argument(
        "--max-kl", type=float, default=0.002, help="largest good mean divergence in nats (%(default)s)"
    )
    parser.add_argument(
        "--max-logprob-error",
        type=float,
        help="largest good mean error of the listed log probabilities, in nats (default: not judged)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
