"""What the commands of both peers share: open, measure, and a file of results that is always up to date."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.facts import machine_facts, utc_now
from bench.peers.measure import Peer, measure
from bench.peers.options import PeerOptions
from glm53srv.errors import Glm53Error

Say = Callable[[str], None]
Open = Callable[[PeerOptions, Say], Peer]


class Results:
    """All figures of a peer, written to a file at every change."""

    def __init__(self, name: str, options: PeerOptions) -> None:
        self._path = options.out
        self.values: dict[str, Any] = {
            "peer": name,
            "begun": utc_now(),
            "machine": machine_facts(),
            "options": {key: _plain(value) for key, value in asdict(options).items()},
        }
        self._save()

    def note(self, name: str, value: Any) -> None:
        """Keep a figure, and print it."""
        self.values[name] = value
        self._save()
        print_line(f"{name}: {_short(value)}")

    def _save(self) -> None:
        if self._path is not None:
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
            new.replace(self._path)  # whole at any time: a peer at its limit is killed without notice


def run_peer(name: str, options: PeerOptions, open_peer: Open) -> int:
    """Open a peer and measure it; gives the exit code.

    Every figure up to an error stays in options.out, and the error beside them.
    """
    results = Results(name, options)
    begin = time.perf_counter()
    try:
        peer = open_peer(options, print_line)
        try:
            results.note("open_s", time.perf_counter() - begin)
            measure(peer, options.rounds, results.note)
            results.note("facts", peer.facts())
        finally:
            peer.close()
    except (BenchError, Glm53Error, OSError, RuntimeError) as error:  # RuntimeError: torch's, all of them
        results.note("error", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return 2
    return 0


def print_line(text: str) -> None:
    """Print a line at once: the reader is a file."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    return str(value)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
