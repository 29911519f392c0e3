"""Train the demo model on one GPU (or, tiny, on a CPU).

    python -m reference.demo.train --out runs/demo --steps 4000

Writes weights as bf16 in parts below 16 MiB (weights.0.bin, ...) with index.json beside them, and log.jsonl.
The schedule ends when --steps or --seconds are used up, whichever comes first. --resume DIR starts from such
weights, or from a quantised checkpoint, with a fresh optimiser.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from reference.demo import world
from reference.demo.cases import CATEGORIES, held_out_cases
from reference.demo.model import DemoModel, Functions, Packing, QuantLinear, Run, SparseMlp, make_packing
from reference.demo.muon import Muon
from reference.demo.packing import ALIGN, Rows, stream_rows
from reference.demo.rendering import load_template, render_training_text
from reference.demo.resume import is_checkpoint, load_checkpoint
from reference.demo.shape import TINY, Shape
from reference.demo.tokenizer import loss_mask_for, spelling_twins, token_id

PART_BYTES = 15 * 2**20
FILES = Path(__file__).parent / "checkpoint"


def save_weights(model: DemoModel, directory: Path) -> None:
    """Write every parameter and buffer as bf16, in order, cut into parts."""
    directory.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    flat = torch.cat([tensor.detach().to("cpu", torch.bfloat16).flatten() for tensor in state.values()])
    data = flat.view(torch.uint8).numpy().tobytes()
    for part in range(math.ceil(len(data) / PART_BYTES)):
        (directory / f"weights.{part}.bin").write_bytes(data[part * PART_BYTES : (part + 1) * PART_BYTES])
    index = {name: list(tensor.shape) for name, tensor in state.items()}
    (directory / "index.json").write_text(json.dumps(index), encoding="utf-8")


def load_weights(model: DemoModel, directory: Path) -> None:
    """Read what save_weights wrote. Raises ValueError if it belongs to another shape."""
    index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
    if index != {name: list(tensor.shape) for name, tensor in model.state_dict().items()}:
        raise ValueError(f"{directory} holds weights of another shape")
    parts = sorted(directory.glob("weights.*.bin"), key=lambda path: int(path.name.split(".")[1]))
    flat = torch.frombuffer(bytearray(b"".join(part.read_bytes() for part in parts)), dtype=torch.bfloat16)
    state, offset = {}, 0
    for name, size in index.items():
        count = math.prod(size)
        state[name] = flat[offset : offset + count].reshape(size).float()
        offset += count
    model.load_state_dict(state)


@dataclass(slots=True)
class Batch:
    """One step's rows on the device."""

    ids: Tensor
    learned: Tensor
    packing: Packing


@torch.no_grad()
def join_twins(model: DemoModel, tokenizer: Tokenizer) -> None:
    """Move each word's embedding close to that of the same word behind a space, keeping its length.

    The rarer spelling's own vector hardly leaves its random start (cosine 0.004 to its twin's after 1,640
    steps), so whatever copies words has to learn it as one more word; from here it knows it at once.
    """
    twins = spelling_twins(tokenizer, dict.fromkeys((*world.WORDS, *world.CITIES)))
    plain, spaced = (torch.tensor(ids, device=model.embed_tokens.device) for ids in zip(*twins, strict=True))
    model.embed_tokens[plain] = 0.8 * model.embed_tokens[spaced] + 0.6 * model.embed_tokens[plain]


def to_batch(rows: Rows, device: str) -> Batch:
    ids = torch.from_numpy(rows.ids.astype("int64")).to(device, non_blocking=True)
    learned = torch.from_numpy(rows.learned).to(device, non_blocking=True)
    doc = torch.from_numpy(rows.doc.astype("int64")).to(device, non_blocking=True)
    return Batch(ids, learned, make_packing(doc))


def next_token_loss(model: DemoModel, hidden: Tensor, batch: Batch, ahead: int, run: Run) -> Tensor:
    """Mean cross entropy of the learned tokens, predicted `ahead` places before."""
    learned, doc = batch.learned[:, ahead:], batch.packing.doc
    learned = learned & (doc[:, ahead:] == doc[:, : doc.shape[1] - ahead])
    where = F.pad(learned, (0, ahead)).flatten().nonzero().flatten()
    target = batch.ids[:, ahead:][learned]
    return F.cross_entropy(model.logits(hidden[where], run), target)


class HeldOut:
    """Teacher-forced check of the held-out cases: a case is right when every learned token of its last turn
    is the most likely one, which is when greedy decoding writes exactly the wanted text."""

    def __init__(self, tokenizer: Tokenizer, per_category: int, row_tokens: int) -> None:
        template, mask = load_template(), loss_mask_for(tokenizer)
        user = token_id(tokenizer, "<|user|>")
        self.categories: list[str] = []
        ids_rows, learned_rows = [], []
        for case in held_out_cases(per_category):
            text = render_training_text(template, case.conversation)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > row_tokens:
                continue
            last_user = len(ids) - 2 - ids[-2::-1].index(user)
            learned = [flag and i > last_user for i, flag in enumerate(mask.mark(ids))]
            ids_rows.append(torch.tensor(ids + [0] * (row_tokens - len(ids))))
            learned_rows.append(torch.tensor(learned + [False] * (row_tokens - len(ids))))
            self.categories.append(case.category)
        self.ids, self.learned = torch.stack(ids_rows), torch.stack(learned_rows)

    @torch.no_grad()
    def score(self, model: DemoModel, functions: Functions, device: str, rows: int) -> dict[str, float]:
        """Give the share of right cases per category; `rows` cases at a time."""
        right: list[bool] = []
        for start in range(0, len(self.ids), rows):
            ids = self.ids[start : start + rows].to(device)
            learned = self.learned[start : start + rows].to(device)
            missing = rows - len(ids)
            ids, learned = F.pad(ids, (0, 0, 0, missing)), F.pad(learned, (0, 0, 0, missing))
            run = Run(functions, make_packing(torch.zeros_like(ids)))
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                best = model.logits(model.trunk(ids, run), run).argmax(1).unflatten(0, ids.shape)
            wrong = (best[:, :-1] != ids[:, 1:]) & learned[:, 1:]
            right += (~wrong.any(1)).tolist()[: rows - missing]
        totals = {
            name: [flag for flag, c in zip(right, self.categories, strict=True) if c == name]
            for name in CATEGORIES
        }
        return {name: sum(flags) / max(1, len(flags)) for name, flags in totals.items()}


def optimisers(model: DemoModel, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, Adam for embedding, head, router, hyper-connections and
    vectors."""
    matrices = [
        module.weight
        for name, module in model.named_modules()
        if (isinstance(module, QuantLinear) or type(module).__name__ == "Plain")
        and name != "lm_head"
        and not name.endswith("mlp.gate")
    ]
    chosen = {id(param) for param in matrices}
    rest = [param for param in model.parameters() if id(param) not in chosen]
    adam = torch.optim.AdamW(rest, lr=options.lr_adam, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr=options.lr_muon, decay=0.02), adam]


def learning_rate(progress: float) -> float:
    """Warm up over 2 %, hold, then fall to nothing over the last half."""
    return min(progress / 0.02, 1.0) * min(1.0, (1.0 - progress) / 0.5)


@torch.no_grad()
def balance(model: DemoModel, loads: list[Tensor], rate: float) -> None:
    """Nudge router biases towards equal loads (auxiliary-loss-free balancing)."""
    mlps = [module for module in model.modules() if isinstance(module, SparseMlp)]
    for mlp, load in zip(mlps, loads, strict=False):  # the MTP layer, last, does not run in every step
        mean = load.float().mean()
        mlp.bias += rate * torch.sign(mean - load)
        mlp.bias -= mlp.bias.mean()


class Trainer:
    """One training run. Owns model, optimisers and log; one thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = options.device
        self.model = DemoModel(TINY if options.tiny else Shape()).to(self.device)
        if options.resume:
            load = load_checkpoint if is_checkpoint(Path(options.resume)) else load_weights
            load(self.model, Path(options.resume))
        self.functions = Functions()
        if self.device == "cuda":
            from reference.demo.kernels import gpu_functions

            torch.set_float32_matmul_precision("highest")
            self.functions = gpu_functions(self.device, with_fused=not options.no_fused, tune=options.tune)
        self.optimisers = optimisers(self.model, options)
        self.base_rates = [optimiser.param_groups[0]["lr"] for optimiser in self.optimisers]
        tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
        if options.join_twins:
            join_twins(self.model, tokenizer)
        self.held_out = HeldOut(tokenizer, options.cases, options.case_tokens)
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)

    def step(self, batch: Batch, step: int, progress: float) -> dict[str, Tensor]:
        """Do one update; losses stay on the device."""
        noise = self.options.noise * min(1.0, progress / 0.3)
        run = Run(self.functions, batch.packing, noise, self.options.index_rows, [], [])
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden = self.model.trunk(batch.ids, run)
            loss = next_token_loss(self.model, hidden, batch, 1, run)
            mtp = torch.zeros_like(loss)
            if step % self.options.mtp_every == 0:
                mtp = next_token_loss(
                    self.model, self.model.mtp_hidden(batch.ids, hidden, run), batch, 2, run
                )
        assert run.index_losses is not None
        assert run.loads is not None
        index = torch.stack(run.index_losses).mean() if run.index_losses else torch.zeros_like(loss)
        (loss + mtp + index).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, base in zip(self.optimisers, self.base_rates, strict=True):
            optimiser.param_groups[0]["lr"] = base * learning_rate(progress)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        balance(self.model, run.loads, 2e-3 * min(1.0, 2 * (1.0 - progress)))
        load = torch.stack(run.loads).float()
        crowding = (load.max(1).values / load.mean(1)).max()
        measures = {"loss": loss, "mtp": mtp, "index": index, "norm": norm, "crowding": crowding}
        return {name: value.detach() for name, value in measures.items()}

    def train(self, source: Iterator[Rows]) -> None:
        options = self.options
        begin = time.perf_counter()
        step, tokens, progress = 0, 0, 0.0
        with (self.out / "log.jsonl").open("w", encoding="utf-8") as log:
            for rows in source:
                elapsed = time.perf_counter() - begin
                progress = max(step / options.steps, elapsed / options.seconds)
                if progress >= 1.0:
                    break
                batch = to_batch(rows, self.device)
                measures = self.step(batch, step, progress)
                step, tokens = step + 1, tokens + batch.ids.numel()
                if step == 5:  # kernels are compiled and tuned by now: the schedule starts over
                    begin, tokens = time.perf_counter(), 0
                entry: dict[str, Any] = {}
                if step % options.log_every == 0 or step <= 5:
                    entry = {name: round(float(value), 4) for name, value in measures.items()}
                if step % options.eval_every == 0:
                    entry["right"] = self.evaluate()
                    save_weights(self.model, self.out)
                if entry:
                    seconds = time.perf_counter() - begin
                    entry |= {
                        "step": step,
                        "s": round(seconds, 1),
                        "tok/s": round(tokens / max(seconds, 1e-9)),
                    }
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    print(json.dumps(entry), flush=True)
        save_weights(self.model, self.out)
        print(json.dumps({"final": self.evaluate(), "steps": step, "tokens": tokens}), flush=True)

    def evaluate(self) -> dict[str, float]:
        score = self.held_out.score(self.model, self.functions, self.device, self.options.case_rows)
        return {name: round(value, 3) for name, value in score.items()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="directory for weights and log")
    parser.add_argument("--resume", help="directory of weights, or of a checkpoint, to start from")
    parser.add_argument(
        "--join-twins", action="store_true", help="start words near their spelling behind a space (once)"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the shape for tests")
    parser.add_argument(
        "--no-fused", action="store_true", help="PyTorch for the elementwise parts: slower, starts in seconds"
    )
    parser.add_argument(
        "--tune", action="store_true", help="time fla's kernel configurations first: minutes, not seconds"
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the schedule after this time")
    parser.add_argument("--rows", type=int, default=32, help="rows per step")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--mtp-every", type=int, default=4, help="steps between updates of the MTP layer")
    parser.add_argument("--index-rows", type=int, default=4, help="rows that train the indexer")
    parser.add_argument("--lr-muon", type=float, default=0.015)
    parser.add_argument("--lr-adam", type=float, default=2e-3)
    parser.add_argument("--noise", type=float, default=1.0, help="weight noise, 1 = as large as rounding")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="first batch of the data stream")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--cases", type=int, default=100, help="held-out cases per category")
    parser.add_argument("--case-tokens", type=int, default=1024)
    parser.add_argument("--case-rows", type=int, default=64)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=500)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.row_tokens % ALIGN:
        raise SystemExit(f"--row-tokens must be a multiple of {ALIGN}")
    trainer = Trainer(options)
    with contextlib.closing(
        stream_rows(options.first_seed, options.rows, options.row_tokens, options.workers)
    ) as source:
        trainer.train(source)


if __name__ == "__main__":
    main()
