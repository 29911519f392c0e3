"""A panel of an independent implementation (transformers, float32) against the served CPU engine.

Positions up to 66 only: beyond, the indexer's cut falls on ties that two correct implementations may break
in two ways (README of the fixtures).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.report import PASSED, run_command
from bench.score_ref_panel import main
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.panel import FORMAT, TOP, entry_of
from glm53srv.panel_texts import PanelText
from glm53srv.request import TokenLogprobs
from tests.e2e.server_process import ServerProcess
from tests.model.goldens import Goldens

DENSE_POSITIONS = 67


@pytest.fixture(scope="module")
def goldens(shared_dir: Path) -> Goldens:
    return Goldens(shared_dir / "fixtures" / "tiny-random")


def golden_panel(goldens: Goldens) -> dict[str, object]:
    """Make the panel that the golden logits are."""
    logits = goldens.logits[:DENSE_POSITIONS, : count_token_ids(goldens.checkpoint_dir, 4096)].astype(
        np.float64
    )
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = []
    for row in logprobs:
        best = np.argsort(-row)[:TOP]
        rows.append(TokenLogprobs(0.0, tuple((int(token), float(row[token])) for token in best)))
    ids = tuple(goldens.token_ids[:DENSE_POSITIONS])
    entry = entry_of(PanelText("golden", ids, tuple(range(DENSE_POSITIONS))), rows)
    return {"format": FORMAT, "engine": "transformers, float32", "top": TOP, "entries": [entry.as_json()]}


def test_the_served_engine_agrees_with_transformers(goldens: Goldens, tmp_path: Path) -> None:
    panel, out = tmp_path / "panel.json", tmp_path / "score.json"
    panel.write_text(json.dumps(golden_panel(goldens)))

    with ServerProcess(goldens.checkpoint_dir) as process:
        words = ["--url", process.url_when_ready(), "--panel", str(panel), "--out", str(out), "--quiet"]
        code = run_command(main, words)

    total = json.loads(out.read_text())["result"]["total"]
    assert code == PASSED
    assert total["positions"] == DENSE_POSITIONS
    assert total["top1"] == 1.0
    assert total["max_kl"] < 1e-5  # what five decimals of a log probability leave
