"""Reference panels: teacher-forced top log-probabilities of stock exllamav3 1.5.1 over fixed token sequences.

    python -m glm53srv.panel MODEL_DIR --texts texts.json --out panel.json        needs a GPU, torch and
    exllamav3

texts.json: a list of {"name", "ids", "positions"}; positions are the places whose next token is scored
(absent: all but the last). A panel holds the same with, per position, the `top` most likely next ids and
their natural log-probabilities, so that an engine can be scored by top-1 agreement and KL divergence without
the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm53srv.errors import CheckpointError, ConfigError

EXLLAMAV3_VERSION = "1.5.1"
TOP = 20
FORMAT = "glm53srv-panel-1"


@dataclass(frozen=True, slots=True)
class PanelText:
    """One token sequence and the positions at which the next token is scored, ascending."""

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PanelEntry:
    """A text with its reference: per position the most likely ids and log-probabilities, best first."""

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


def parse_texts(entries: list[dict[str, Any]]) -> list[PanelText]:
    """Check the entries of a texts file. Raises ConfigError that names the entry."""
    texts = []
    for number, entry in enumerate(entries):
        ids = tuple(int(token) for token in entry["ids"])
        positions = tuple(int(place) for place in entry.get("positions", range(len(ids) - 1)))
        if not positions or positions[0] < 0 or positions[-1] >= len(ids):
            raise ConfigError(f"text {number}: positions must lie in [0, {len(ids)})")
        texts.append(PanelText(str(entry.get("name", number)), ids, positions))
    return texts


def load_panel(path: Path) -> list[PanelEntry]:
    """Read a panel file. Raises ConfigError if it is something else."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path} is no panel file (format {content.get('format')!r}, wanted {FORMAT!r})")
    return [
        PanelEntry(
            entry["name"],
            tuple(entry["ids"]),
            tuple(entry["positions"]),
            tuple(tuple(ids) for ids in entry["top_ids"]),
            tuple(tuple(values) for values in entry["top_logprobs"]),
        )
        for entry in content["entries"]
    ]


class ReferenceModel:
    """A checkpoint in stock exllamav3 on cuda:0. One thread, under torch.inference_mode()."""

    def __init__(self, model_dir: Path) -> None:
        # exact kernels: int8 activations off, no timing-dependent fp16 accumulators
        os.environ.setdefault("EXL3_INT8_GEMV", "0")
        os.environ.setdefault("EXL3_HGEMM_F16ACC", "0")
        self._torch: Any = importlib.import_module("torch")
        package: Any = importlib.import_module("exllamav3")
        version = importlib.import_module("exllamav3.version").__version__
        if version != EXLLAMAV3_VERSION:
            raise ConfigError(f"panels are made with exllamav3 {EXLLAMAV3_VERSION}, found {version}")
        if not (model_dir / "config.json").is_file():
            raise CheckpointError(f"{model_dir} has no config.json")
        self.config = package.Config.from_directory(str(model_dir))
        self.model = package.Model.from_config(self.config)
        self.package = package
        self.model.load(device="cuda:0", progressbar=False)

    def logits(self, ids: tuple[int, ...]) -> Any:
        """Give the next-token logits, fp32 (len(ids), vocab) on the GPU, in one uncached forward pass."""
        with self._torch.inference_mode():
            batch = self._torch.tensor([list(ids)], dtype=self._torch.int64)
            return self.model.forward(batch, {"attn_mode": "flash_attn_nc"})[0].float()

    def score(self, text: PanelText, vocab_size: int) -> PanelEntry:
        """Score one text."""
        rows = self.logits(text.ids)[list(text.positions), :vocab_size].log_softmax(-1)
        best = rows.topk(TOP, dim=-1)
        top_ids = tuple(tuple(int(token) for token in row) for row in best.indices.tolist())
        values = tuple(tuple(round(float(value), 5) for value in row) for row in best.values.tolist())
        return PanelEntry(text.name, text.ids, text.positions, top_ids, values)


def write_panel(model: ReferenceModel, texts: list[PanelText], vocab_size: int, out: Path) -> int:
    """Score all texts and write the panel; give the number of positions."""
    entries = [asdict(model.score(text, vocab_size)) for text in texts]
    content = {"format": FORMAT, "engine": f"exllamav3 {EXLLAMAV3_VERSION}", "top": TOP, "entries": entries}
    out.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return sum(len(text.positions) for text in texts)


def main(argv: list[str] | None = None) -> int:
    """Make a panel from the command line."""
    parser = argparse.ArgumentParser(
        prog="glm53srv panel", description="make a reference panel with exllamav3"
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    texts = parse_texts(json.loads(options.texts.read_text(encoding="utf-8")))
    config = json.loads((options.model_dir / "config.json").read_text(encoding="utf-8"))
    model = ReferenceModel(options.model_dir)
    num_positions = write_panel(model, texts, int(config["text_config"]["vocab_size"]), options.out)
    sys.stdout.write(f"{options.out}: {len(texts)} texts, {num_positions} positions\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
