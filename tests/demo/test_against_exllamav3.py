"""The CPU engine against stock exllamav3 1.5.1 on a GPU, on the demo model: likelihoods and greedy answers.

The two share nothing but the checkpoint: exllamav3 computes in half precision with its CUDA kernels, the CPU
engine in float32 with ours. Several of the panel's texts are longer than index_topk, so the sparse selection
is compared as well. About ten seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.panel_score import load_panel, score_position, summarise
from glm53srv.config import load_config
from glm53srv.engine.base import Engine
from glm53srv.engine.factory import load_engine
from glm53srv.machine import read_machine
from glm53srv.panel import EngineReference, PanelText

MIN_TOP1 = 0.99
MAX_MEAN_KL = 0.005
MIN_POSITIONS = 2000
INDEX_TOPK = 256
MIN_EQUAL_TEXTS = 45
MAX_ANSWER_TOKENS = 200
"""As reference.demo.reference_run asks of exllamav3."""


@pytest.fixture(scope="module")
def engine(demo_model_dir: Path) -> Iterator[Engine]:
    config = load_config(["--model", str(demo_model_dir)], {}).engine
    engine = load_engine(config, read_machine(), lambda fraction, stage: None)
    yield engine
    engine.close()


def test_likelihoods_agree_at_all_positions(engine: Engine, demo_panel_path: Path) -> None:
    panel = load_panel(demo_panel_path)
    reference = EngineReference(engine, "CPU engine")

    scores = []
    for entry in panel.entries:
        text = PanelText(entry.name, entry.ids, tuple(sorted(entry.reference)))
        ours = reference.score(text, engine.limits.vocab_size)
        for position, ids, logprobs in zip(ours.positions, ours.top_ids, ours.top_logprobs, strict=True):
            scores.append(score_position(entry.reference[position], dict(zip(ids, logprobs, strict=True))))

    total = summarise(scores)
    assert panel.engine == "exllamav3 1.5.1"
    assert total.positions >= MIN_POSITIONS
    assert sum(position > INDEX_TOPK for entry in panel.entries for position in entry.reference) > 200
    assert total.top1 >= MIN_TOP1, total
    assert total.mean_kl <= MAX_MEAN_KL, total


def test_greedy_answers_are_the_same_texts(engine: Engine, demo_greedy_path: Path) -> None:
    cases = json.loads(demo_greedy_path.read_bytes())
    reference = EngineReference(engine, "CPU engine")

    differing = []
    for case in cases:
        prompt = tuple(case["prompt_ids"])
        answered = reference.answer(PanelText(case["category"], prompt, ()), MAX_ANSWER_TOKENS)
        ours = list(answered.ids[len(prompt) :])
        if ours[-1] in engine.limits.eos_token_ids:  # exllamav3 keeps the stop token to itself
            ours.pop()
        if ours != case["output_ids"]:
            differing.append((case["category"], ours, case["output_ids"]))

    assert len(cases) == 50
    assert all(case["output_ids"] for case in cases)
    assert len(cases) - len(differing) >= MIN_EQUAL_TEXTS, differing
