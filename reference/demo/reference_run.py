"""Check a converted demo checkpoint with stock exllamav3 on a GPU and write its reference files.

    python -m reference.demo.reference_run CHECKPOINT OUT_DIR panel
    python -m reference.demo.reference_run CHECKPOINT OUT_DIR greedy

The first writes demo-exl3-ref-panel.json and prints the share of right held-out cases per category
(teacher-forced: right means that greedy decoding would write the wanted text); the second writes
demo-exl3-greedy.json, 50 prompts with the text that the stock generator makes of them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from glm53srv.model.pack_tokenizer import EOS_TOKENS
from glm53srv.panel import PanelText, ReferenceModel, write_panel
from reference.demo.cases import CATEGORIES, Case, held_out_case, held_out_cases
from reference.demo.panel_chats import NAME, chat_request, panel_conversation, prompt_length
from reference.demo.rendering import Template, load_template, render_training_text
from reference.demo.tokenizer import loss_mask_for, token_id

NUM_GREEDY = 50
CASES_PER_CATEGORY = 40
PANEL_POSITIONS = 2400


def case_tokens(tokenizer: Tokenizer, template: Template, case: Case) -> tuple[list[int], int]:
    """Give a case's tokens and where its last turn's learned part begins."""
    ids: list[int] = tokenizer.encode(
        render_training_text(template, case.conversation), add_special_tokens=False
    ).ids
    user = token_id(tokenizer, "<|user|>")
    return ids, len(ids) - 2 - ids[-2::-1].index(user)


def score_cases(model: ReferenceModel, tokenizer: Tokenizer, per_category: int) -> dict[str, float]:
    """Score the held-out cases on the quantised model."""
    template, mask = load_template(), loss_mask_for(tokenizer)
    right: dict[str, list[bool]] = {name: [] for name in CATEGORIES}
    for case in held_out_cases(per_category):
        ids, last_user = case_tokens(tokenizer, template, case)
        learned = [place for place, flag in enumerate(mask.mark(ids)) if flag and place > last_user]
        best = model.logits(tuple(ids)).argmax(-1).tolist()
        right[case.category].append(all(best[place - 1] == ids[place] for place in learned))
    return {name: sum(flags) / len(flags) for name, flags in right.items()}


def panel_texts(tokenizer: Tokenizer) -> list[PanelText]:
    """Draw held-out conversations, every third a long one, until enough assistant tokens are scored."""
    template, mask = load_template(), loss_mask_for(tokenizer)
    texts: list[PanelText] = []
    number = 0
    while sum(len(text.positions) for text in texts) < PANEL_POSITIONS:
        drawn = panel_conversation(number)
        ids = tokenizer.encode(render_training_text(template, drawn), add_special_tokens=False).ids
        positions = tuple(place - 1 for place, flag in enumerate(mask.mark(ids)) if flag)
        asked, num_prompt = chat_request(drawn), prompt_length(ids, tokenizer)
        texts.append(PanelText(NAME.format(number), tuple(ids), positions, asked, num_prompt))
        number += 1
    return texts


def greedy_texts(model: ReferenceModel, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Generate greedily from 50 held-out prompts with the stock generator, one at a time."""
    package = model.package
    stops = [token_id(tokenizer, token) for token in EOS_TOKENS]
    served = package.Model.from_config(model.config)  # a cache is attached before a model loads
    cache = package.Cache(served, max_num_tokens=8192, max_batch_size=1)
    served.load(device="cuda:0", progressbar=False)
    generator = package.Generator(
        served, cache, package.Tokenizer.from_config(model.config), max_batch_size=1
    )
    template, mask = load_template(), loss_mask_for(tokenizer)
    sampler = importlib.import_module("exllamav3.generator.sampler").ArgmaxSampler()
    results = []
    for number in range(NUM_GREEDY):
        category = CATEGORIES[number % len(CATEGORIES)]
        case = held_out_case(category, number // len(CATEGORIES))
        ids, last_user = case_tokens(tokenizer, template, case)
        first = next(place for place, flag in enumerate(mask.mark(ids)) if flag and place > last_user)
        job = package.Job(
            torch.tensor([ids[:first]]), max_new_tokens=200, stop_conditions=stops, sampler=sampler
        )
        generator.enqueue(job)
        produced: list[int] = []
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                tokens = result.get("token_ids")
                if result["stage"] == "streaming" and tokens is not None:
                    produced += tokens.flatten().tolist()
        results.append({"category": category, "prompt_ids": ids[:first], "output_ids": produced})
    return results


def main() -> None:
    checkpoint, out, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    model = ReferenceModel(checkpoint)
    if wanted == "greedy":
        greedy = greedy_texts(model, tokenizer)
        (out / "demo-exl3-greedy.json").write_text(
            json.dumps(greedy, separators=(",", ":")) + "\n", encoding="utf-8"
        )
        for entry in greedy[:12]:
            print(repr(tokenizer.decode(entry["output_ids"], skip_special_tokens=False)), flush=True)
        return
    positions = write_panel(
        model, panel_texts(tokenizer), tokenizer.get_vocab_size(), out / "demo-exl3-ref-panel.json"
    )
    print(f"panel: {positions} positions", flush=True)
    scores = score_cases(model, tokenizer, CASES_PER_CATEGORY)
    print(
        json.dumps({"held_out_quantised": {name: round(value, 3) for name, value in scores.items()}}),
        flush=True,
    )


if __name__ == "__main__":
    main()
