"""Hold the CUDA engine against stock exllamav3 on one checkpoint, on a GPU.

    python -m bench.cuda.check_engine CHECKPOINT exact --save decode.npz
    python -m bench.cuda.check_engine CHECKPOINT fast --against decode.npz

`exact`: prefill and decode logits of both, in one process with the same numerics: equal bit for bit, with a
cache of few slots that poisons them before each copy, staging on, chunks paused between layers by decode
steps, alone and in batches of 2 and 4 as stock runs them. A line per case; exits with 1 if one differs.
`fast`: the same tokens decoded with the CPU's experts against the saved logits of `exact`: KL and top-1.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.cuda.agreement import Logits, agreement, difference, worst_of
from glm53srv.engine.base import DecodeRow, PrefillSlice, SampledToken, SequenceStart, StepPlan
from glm53srv.engine.cuda.engine import CudaEngine
from glm53srv.engine.cuda.loading import CudaOptions
from glm53srv.engine.sampler import SamplerBank
from glm53srv.machine import read_machine
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.look_ahead import NUM_AHEAD
from glm53srv.offload.vram_plan import VramOptions
from glm53srv.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CHUNK = 512
PAGES_PER_SLOT = 8
DECODE_STEPS = 20


class Tap(SamplerBank):
    """A sampler that keeps the logits given since forget(): a step's decode rows, then its prompt's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: list[Logits] = []

    def forget(self) -> None:
        self._kept.clear()

    @property
    def seen(self) -> Logits:
        return np.concatenate(self._kept)

    def sample(self, slots: Sequence[int], logits: Any) -> list[SampledToken]:
        self._kept.append(np.array(logits))
        return super().sample(slots, logits)


class Ours:
    """The engine, driven step by step; decode follows given tokens."""

    def __init__(self, model_dir: Path, options: CudaOptions) -> None:
        self.engine = CudaEngine.load(model_dir, options, read_machine())
        limits = self.engine.limits
        self.tap = Tap(limits.vocab_size, limits.eos_token_ids)
        self.engine._sampler = self.tap
        try:
            self.engine.warm_up()
        except BaseException:
            self.engine.close()
            raise
        self._step = 0
        self.positions: dict[int, int] = {}

    def run(self, plan: dict[str, Any]) -> Any:
        self._step += 1
        self.tap.forget()
        return self.engine.step(StepPlan(self._step, **plan))

    def pieces(self, slot: int, ids: Sequence[int], layers: int | None = None) -> Iterator[PrefillSlice]:
        """Cut a prompt into slices: whole chunks, or `layers` layers at a time."""
        depth = self.engine.limits.num_layers
        for begin in range(0, len(ids), CHUNK):
            part = tuple(ids[begin : begin + CHUNK])
            for first in range(0, depth, layers or depth):
                yield PrefillSlice(
                    slot,
                    part,
                    begin,
                    self.pages(slot),
                    first,
                    min(depth, first + (layers or depth)),
                    begin + CHUNK >= len(ids),
                    SequenceStart(f"s{slot}", GREEDY, 0, tuple(ids)) if begin == first == 0 else None,
                )
        self.positions[slot] = len(ids)

    def prefill(self, slot: int, ids: Sequence[int]) -> Logits:
        for piece in self.pieces(slot, ids):
            self.run({"prefill": piece})
        return self.tap.seen[-1:]

    def rows(self, slots: Sequence[int], tokens: Sequence[int]) -> tuple[DecodeRow, ...]:
        rows = tuple(
            DecodeRow(slot, token, self.positions[slot], self.pages(slot))
            for slot, token in zip(slots, tokens, strict=True)
        )
        for slot in slots:
            self.positions[slot] += 1
        return rows

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Logits:
        self.run({"decode": self.rows(slots, tokens)})
        return self.tap.seen[: len(slots)]

    def release(self, *slots: int) -> None:
        self.run({"release": slots})

    @staticmethod
    def pages(slot: int) -> tuple[int, ...]:
        return tuple(range(slot * PAGES_PER_SLOT, (slot + 1) * PAGES_PER_SLOT))


class Stock:
    """The unmodified package with everything in VRAM, in the calls that its generator makes."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        exllamav3: Any = importlib.import_module("exllamav3")
        torch: Any = importlib.import_module("torch")

        self._torch = torch
        self._vocab_size = vocab_size
        config = exllamav3.Config.from_directory(str(model_dir))
        self.model = exllamav3.Model.from_config(config)
        self.cache = exllamav3.Cache(
            self.model,
            max_num_tokens=256 * PAGES_PER_SLOT * 5,
            layer_type=exllamav3.CacheLayer_fp16,
            max_batch_size=5,
        )
        with torch.inference_mode():
            self.model.load(device="cuda:0", progressbar=False)
        self.states: dict[int, Any] = {}

    def _params(self, slots: Sequence[int], width: int) -> dict[str, Any]:
        torch = self._torch
        table = torch.zeros((len(slots), width), dtype=torch.int32)
        for row, slot in enumerate(slots):
            pages = Ours.pages(slot)[:width]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return {
            "attn_mode": "flash_attn",
            "cache": self.cache,
            "block_table": table,
            "cache_seqlens": torch.tensor([self.states[slot].position for slot in slots], dtype=torch.int32),
            "recurrent_states": [self.states[slot] for slot in slots],
            "indexed_embeddings": [],
        }

    def prefill(self, slot: int, ids: Sequence[int]) -> Logits:
        torch = self._torch
        with torch.inference_mode():
            if slot in self.states:
                self.states.pop(slot).free()
            self.states[slot] = self.cache.get_new_state()
            for begin in range(0, len(ids), CHUNK):
                part = torch.tensor([list(ids[begin : begin + CHUNK])])
                width = -(-(begin + part.shape[1]) // 256)
                params = self._params([slot], width)
                if begin + CHUNK < len(ids):
                    self.model.prefill(part, params)
                else:
                    logits = self.model.forward(part, params | {"last_tokens_only": 1})
        return self._host(logits[0])

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Logits:
        torch = self._torch
        with torch.inference_mode():
            longest = max(self.states[slot].position for slot in slots) + 1
            width = -(-longest // (16 * 256)) * 16
            logits = self.model.forward(
                torch.tensor([[token] for token in tokens]), self._params(slots, width)
            )
        return self._host(logits[:, 0])

    def _host(self, logits: Any) -> Logits:
        rows: Logits = logits[:, : self._vocab_size].float().cpu().numpy()
        return rows


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Draw tokens, the same for the same seed."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, min(vocab, 4000), length).tolist()
    return drawn


class Table:
    """Prints a line per case and remembers whether one failed."""

    def __init__(self) -> None:
        self.failures = 0

    def case(self, name: str, check: Callable[[], float], limit: float = 0.0) -> None:
        try:
            worst = check()
        except Exception:
            traceback.print_exc()
            worst = float("nan")
        is_good = worst <= limit
        self.failures += not is_good
        sys.stdout.write(f"{'ok  ' if is_good else 'FAIL'} {name:58s} max difference {worst:.3g}\n")
        sys.stdout.flush()


def compare_prefill(ours: Ours, stock: Stock, vocab: int, length: int) -> float:
    ids = prompt(length, length, vocab)
    worst = difference(ours.prefill(0, ids), stock.prefill(0, ids))
    ours.release(0)
    return worst


def compare_decode(ours: Ours, stock: Stock, vocab: int, width: int, length: int) -> float:
    slots = list(range(width))
    for slot in slots:
        ids = prompt(100 + slot, length + 3 * slot, vocab)
        ours.prefill(slot, ids)
        stock.prefill(slot, ids)
    worst = 0.0
    for step in range(DECODE_STEPS):
        tokens = prompt(1000 + step, width, vocab)
        worst = worst_of(worst, difference(ours.decode(slots, tokens), stock.decode(slots, tokens)))
    ours.release(*slots)
    return worst


def compare_paused(ours: Ours, stock: Stock, vocab: int, layers: int) -> float:
    """Prefill slot 1 some layers at a time, with a decode step of slot 0 in each step."""
    first, second = prompt(7, 90, vocab), prompt(8, 700, vocab)
    ours.prefill(0, first)
    stock.prefill(0, first)
    worst = 0.0
    for step, piece in enumerate(ours.pieces(1, second, layers)):
        token = prompt(2000 + step, 1, vocab)
        ours.run({"prefill": piece, "decode": ours.rows([0], token)})
        seen = ours.tap.seen
        worst = worst_of(worst, difference(seen[:1], stock.decode([0], token)))
    worst = worst_of(worst, difference(seen[1:], stock.prefill(1, second)))
    for step in range(5):
        tokens = prompt(3000 + step, 2, vocab)
        worst = worst_of(worst, difference(ours.decode([0, 1], tokens), stock.decode([0, 1], tokens)))
    ours.release(0, 1)
    return worst


def compare_aborted(ours: Ours, stock: Stock, vocab: int) -> float:
    """Drop a prompt between two layers of its second chunk; the next one must not notice."""
    pieces = list(ours.pieces(2, prompt(9, 900, vocab), 1))
    for piece in pieces[: len(pieces) - 3]:
        ours.run({"prefill": piece})
    ours.release(2)
    return compare_prefill(ours, stock, vocab, 300)


def check_exact(ours: Ours, model_dir: Path, save: Path | None) -> int:
    """Run all comparisons; gives the number of failures."""
    vocab = ours.engine.limits.vocab_size
    stock = Stock(model_dir, vocab)
    table = Table()
    for length in (1, 5, 17, 64, 300, 512, 700, 1500):
        table.case(
            f"prefill of {length} tokens", functools.partial(compare_prefill, ours, stock, vocab, length)
        )
    for width in (1, 2, 4):
        for length in (40, 600):
            table.case(
                f"decode of {width} rows behind {length} tokens",
                functools.partial(compare_decode, ours, stock, vocab, width, length),
            )
    for layers in (1, 3):
        table.case(
            f"prefill of {layers} layers a step beside decode",
            functools.partial(compare_paused, ours, stock, vocab, layers),
        )
    table.case("prefill after an aborted one", lambda: compare_aborted(ours, stock, vocab))
    table.case("resident slots against their home", lambda: float(ours.engine.check_slots(1000) < 1))
    if save is not None:
        np.savez(save, logits=teacher_forced(ours, vocab))
    return table.failures


def teacher_forced(ours: Ours, vocab: int, num_prompts: int = 36, num_steps: int = 100) -> Logits:
    """Decode given tokens one row at a time: float32 (num_prompts * num_steps, vocabulary)."""
    rows = []
    for number in range(num_prompts):
        ours.prefill(0, prompt(50 + number, 60 + 40 * number, vocab))
        tokens = prompt(70 + number, num_steps, vocab)
        rows += [ours.decode([0], [token])[0] for token in tokens]
        ours.release(0)
    return np.stack(rows)


def check_fast(ours: Ours, against: Path) -> int:
    """Compare with the saved logits of exact mode; gives the number of missed targets."""
    vocab = ours.engine.limits.vocab_size
    with np.load(against) as file:
        exact = file["logits"]
    found = agreement(exact, teacher_forced(ours, vocab))
    sys.stdout.write(f"fast against exact, {found}\n")
    return int(not found.is_good)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("mode", choices=("exact", "fast"))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument(
        "--ct-prefill", type=int, default=0, help="let the CPU help prompt chunks of so many tokens, unstaged"
    )
    parser.add_argument("--ahead", type=int, default=NUM_AHEAD, help="experts fetched ahead of their layer")
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel of a step from Python")
    given = parser.parse_args(argv)
    offload = OffloadOptions(
        mode=given.mode,
        vram=VramOptions(max_slots=given.slots, ahead=given.ahead),
        chunk_slots=max(1, given.slots // 8),
        # Both lanes busy in fast mode: the CPU takes about half of the misses.
        costs=CostOverrides(0.0, 0.4, 0.4) if given.mode == "fast" else CostOverrides(),
        crew_threads=4,
        stage_min_picks=10**9 if given.ct_prefill else 64,
        cpu_prefill_tokens=given.ct_prefill,
    )
    options = CudaOptions(
        offload,
        cache_tokens=256 * PAGES_PER_SLOT * 4,
        max_chunk_tokens=CHUNK,
        poisons=True,
        graphs=not given.no_graphs,
    )
    begin = time.perf_counter()
    ours = Ours(given.model_dir, options)
    sys.stdout.write(f"loaded and warm in {time.perf_counter() - begin:.1f} s\n")
    widths = ours.engine.captured_widths
    sys.stdout.write(f"decode steps captured for {widths} rows\n")
    failures = int(options.graphs and not widths)
    failures += (
        check_exact(ours, given.model_dir, given.save)
        if given.mode == "exact"
        else check_fast(ours, given.against)
    )
    sys.stdout.write(f"counts {ours.engine.offload.counts}\n")
    if ours.engine.offload.lane is not None:
        sys.stdout.write(f"crew {ours.engine.offload.lane.stats()}\n")
    ours.engine.close()
    sys.stdout.write("all equal\n" if not failures else f"{failures} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
