"""Reference panels, and how far a server's log probabilities are from them. Pure.

A panel file is JSON: {"format": "glm53srv-panel-1", "engine", "top", "entries": [{"name", "ids", "positions",
"top_ids", "top_logprobs", "chat"?, "num_prompt"?}]}. Position p judges the token after ids[p]; its reference
is the `top` most likely ids, best first, with natural log probabilities. `chat`, where present, is the chat
request whose rendered prompt is ids[:num_prompt], so that a server's template is checked too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BadInput

PANEL_FORMAT = "glm53srv-panel-1"

Logprobs = Mapping[int, float]
"""Natural log probability by token id, of the most likely ids only."""


@dataclass(frozen=True, slots=True)
class PanelEntry:
    """One sequence of a panel. reference: by position, ascending."""

    name: str
    ids: tuple[int, ...]
    reference: Mapping[int, Logprobs]
    chat: Mapping[str, Any] | None = None
    num_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel file. engine: what made it. top: ids per position."""

    engine: str
    top: int
    entries: tuple[PanelEntry, ...]

    @property
    def num_positions(self) -> int:
        """Scored positions of all entries."""
        return sum(len(entry.reference) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class PositionScore:
    """One position. is_same_top: both put the same id first. num_unlisted: reference ids the server did not
    list. logprob_error: mean distance of the log probabilities of the reference's ids, in nats."""

    is_same_top: bool
    kl: float
    num_unlisted: int
    logprob_error: float


@dataclass(frozen=True, slots=True)
class Score:
    """Positions put together. kl in nats.

    logprob_error: mean over positions. Where a model is sure of itself, nearly all of the mass is on one id
    and a divergence does not see what happens to the other nineteen; this does, and finds damage that the
    answers do not show yet.
    """

    positions: int
    top1: float
    mean_kl: float
    p99_kl: float
    max_kl: float
    unlisted: int
    logprob_error: float


def load_panel(path: Path) -> Panel:
    """Read a panel file. Raises BadInput, one line, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != PANEL_FORMAT:
        raise BadInput(
            f"{path}: no panel (its format is not {PANEL_FORMAT!r}); make one: glm53srv panel make"
        )
    try:
        entries = tuple(_entry(entry) for entry in content["entries"])
        panel = Panel(str(content.get("engine", "unknown")), int(content["top"]), entries)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: a broken panel: {error!r}") from error
    if panel.num_positions == 0:
        raise BadInput(f"{path}: a panel without positions")
    return panel


def _entry(entry: Mapping[str, Any]) -> PanelEntry:
    ids = tuple(int(token) for token in entry["ids"])
    reference = {}
    for position, top_ids, logprobs in zip(
        entry["positions"], entry["top_ids"], entry["top_logprobs"], strict=True
    ):
        if not 0 <= position < len(ids):
            raise ValueError(f"{entry['name']}: position {position} of {len(ids)} ids")
        reference[int(position)] = dict(zip(top_ids, logprobs, strict=True))
    return PanelEntry(
        name=str(entry["name"]),
        ids=ids,
        reference=reference,
        chat=entry.get("chat"),
        num_prompt=int(entry.get("num_prompt", 0)),
    )


def score_position(reference: Logprobs, served: Logprobs) -> PositionScore:
    """Compare two lists of the most likely ids.

    The divergence KL(reference || served) is taken over the reference's ids and one outcome for all others.
    A reference id that the server did not list is at most as likely as its least likely listed id, and counts
    as that likely: the kindest reading. What results is a divergence of two distributions and never negative,
    since as many listed ids stand outside the reference as reference ids are unlisted.
    """
    floor = min(served.values())
    kl, mass, served_mass, num_unlisted, distance = 0.0, 0.0, 0.0, 0, 0.0
    for token, logprob in reference.items():
        other = served.get(token)
        if other is None:
            num_unlisted += 1
            other = floor
        p = math.exp(logprob)
        kl += p * (logprob - other)
        distance += abs(logprob - other)
        mass += p
        served_mass += math.exp(other)
    # rounding of the files' decimals may lift a sum a little over 1
    rest, served_rest = max(1.0 - mass, 0.0), max(1.0 - served_mass, 1e-12)
    if rest > 0.0:
        kl += rest * math.log(rest / served_rest)
    is_same_top = best_of(reference) == best_of(served)
    return PositionScore(is_same_top, max(kl, 0.0), num_unlisted, distance / len(reference))


def best_of(logprobs: Logprobs) -> int:
    """Give the most likely id, the first listed of equals: files hold rounded numbers, best first."""
    return max(logprobs, key=lambda token: logprobs[token])


def summarise(scores: Sequence[PositionScore]) -> Score:
    """Put positions together. scores: at least one."""
    kls = sorted(score.kl for score in scores)
    return Score(
        positions=len(scores),
        top1=sum(score.is_same_top for score in scores) / len(scores),
        mean_kl=sum(kls) / len(kls),
        p99_kl=kls[math.ceil(0.99 * len(kls)) - 1],
        max_kl=kls[-1],
        unlisted=sum(score.num_unlisted for score in scores),
        logprob_error=sum(score.logprob_error for score in scores) / len(scores),
    )
