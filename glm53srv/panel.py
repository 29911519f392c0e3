"""Reference panels: teacher-forced top log-probabilities of a trusted engine over fixed token sequences.

    glm53srv panel make --model DIR --out panel.json                      by this server's own engine
    glm53srv panel make --model DIR --reference exllamav3 --texts texts.json --out panel.json
                                                  by stock exllamav3 1.5.1: needs a GPU, torch and exllamav3

A panel holds, per position, the `top` most likely next ids and their natural log-probabilities, so that a
server can be scored by top-1 agreement and KL divergence without the reference (bench/score_ref_panel.py,
which describes the file). What the texts are: panel_texts.py.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from glm53srv.engine.base import Engine
from glm53srv.engine.drive import EngineDriver
from glm53srv.errors import CheckpointError, ConfigError
from glm53srv.flags import take_flags
from glm53srv.panel_texts import PanelText, default_texts, parse_texts, read_texts
from glm53srv.progress import Progress
from glm53srv.request import TokenLogprobs

__all__ = ["FORMAT", "TOP", "PanelEntry", "PanelText", "ReferenceModel", "load_panel", "make_panel"]
__all__ += ["parse_texts", "write_panel"]

EXLLAMAV3_VERSION = "1.5.1"
TOP = 20
FORMAT = "glm53srv-panel-1"
ANSWER_TOKENS = 256
"""How far the reference continues a chat: eight chats then give about 2,500 positions."""

REFERENCES = ("engine", "exllamav3")
FLAGS = {
    "--out": "a file",
    "--texts": "a file",
    "--reference": f"one of {', '.join(REFERENCES)}",
    "--answer-tokens": "a whole number",
}


@dataclass(frozen=True, slots=True)
class PanelEntry:
    """A text with its reference: per position the most likely ids and log-probabilities, best first."""

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    chat: dict[str, Any] | None = None
    num_prompt: int = 0

    def as_json(self) -> dict[str, Any]:
        """Give it as in the file."""
        content: dict[str, Any] = {
            "name": self.name,
            "ids": self.ids,
            "positions": self.positions,
            "top_ids": self.top_ids,
            "top_logprobs": self.top_logprobs,
        }
        if self.chat is not None:
            content |= {"chat": self.chat, "num_prompt": self.num_prompt}
        return content


class Reference(Protocol):
    """An engine that is trusted."""

    @property
    def engine_name(self) -> str:
        """Name it as the panel is to name it."""

    def score(self, text: PanelText, vocab_size: int) -> PanelEntry:
        """Judge one text. vocab_size: ids that stand for tokens; rows of the head beyond are padding."""


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
            entry.get("chat"),
            int(entry.get("num_prompt", 0)),
        )
        for entry in content["entries"]
    ]


class EngineReference:
    """An engine of this server as the reference. Owns the engine's slots; the engine's thread only."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine_name = name
        self._engine = engine
        self._driver = EngineDriver(engine)

    def answer(self, text: PanelText, num_tokens: int) -> PanelText:
        """Continue a text greedily, to the end of the turn or for num_tokens; scores the new places too."""
        told = self._driver.open([text.ids], num_top=1, room_tokens=num_tokens)
        ids = list(text.ids)
        best = told[0][-1].top[0][0]
        for _ in range(num_tokens):
            ids.append(best)
            if best in self._engine.limits.eos_token_ids:
                break
            logprobs = self._driver.decode([best])[0].logprobs
            assert logprobs is not None
            best = logprobs.top[0][0]
        self._driver.release()
        return replace(text, ids=tuple(ids), positions=(*text.positions, *range(len(text.ids), len(ids) - 1)))

    def score(self, text: PanelText, vocab_size: int) -> PanelEntry:
        """Judge one text in one prefill."""
        if max(text.ids) >= vocab_size:
            raise ConfigError(f"{text.name}: id {max(text.ids)} is none of the model's {vocab_size}")
        first = text.positions[0]
        judged = self._driver.open([text.ids], num_top=TOP, first_judged=first + 1)[0]
        self._driver.release()
        wanted = [judged[position - first] for position in text.positions]
        return entry_of(text, wanted)


def entry_of(text: PanelText, judged: Sequence[TokenLogprobs]) -> PanelEntry:
    """Put a text and what was said of its positions together."""
    return PanelEntry(
        name=text.name,
        ids=text.ids,
        positions=text.positions,
        top_ids=tuple(tuple(token for token, _ in row.top) for row in judged),
        top_logprobs=tuple(tuple(round(value, 5) for _, value in row.top) for row in judged),
        chat=None if text.chat is None else dict(text.chat),
        num_prompt=text.num_prompt,
    )


class ReferenceModel:
    """A checkpoint in stock exllamav3 on cuda:0. One thread, under torch.inference_mode()."""

    engine_name = f"exllamav3 {EXLLAMAV3_VERSION}"

    def __init__(self, model_dir: Path) -> None:
        # Exact kernels: int8 activations off, no timing-dependent fp16 accumulators. Set, not defaulted: the
        # package reads them at import, and a value left in the caller's shell would spoil a reference unseen.
        os.environ["EXL3_INT8_GEMV"] = "0"
        os.environ["EXL3_HGEMM_F16ACC"] = "0"
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
        pairs = [
            tuple((int(token), float(value)) for token, value in zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return entry_of(text, [TokenLogprobs(0.0, pair) for pair in pairs])


def write_panel(model: Reference, texts: Sequence[PanelText], vocab_size: int, out: Path) -> int:
    """Score all texts and write the panel; give the number of positions."""
    entries = [model.score(text, vocab_size).as_json() for text in texts]
    content = {"format": FORMAT, "engine": model.engine_name, "top": TOP, "entries": entries}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return sum(len(text.positions) for text in texts)


@dataclass(frozen=True, slots=True)
class PanelOptions:
    """What `glm53srv panel make` takes besides the configuration. texts None: the chats of panel_texts."""

    out: Path
    texts: Path | None = None
    reference: str = "engine"
    answer_tokens: int = ANSWER_TOKENS

    @classmethod
    def parse(cls, argv: Sequence[str]) -> tuple[PanelOptions, list[str]]:
        """Take the command's own words off; gives what is left. Raises ConfigError."""
        words, flags = take_flags(argv, FLAGS)
        if words[:1] != ["make"]:
            raise ConfigError("panel what? `glm53srv panel make --model DIR --out FILE` is the one thing")
        if "--out" not in flags:
            raise ConfigError("panel make needs --out FILE")
        reference = flags.get("--reference", "engine")
        answer_tokens = flags.get("--answer-tokens", str(ANSWER_TOKENS))
        if reference not in REFERENCES:
            raise ConfigError(f"--reference is {reference!r}, must be one of {', '.join(REFERENCES)}")
        if not answer_tokens.isdigit():
            raise ConfigError(f"--answer-tokens is {answer_tokens!r}, must be a whole number from 0")
        options = cls(
            out=Path(flags["--out"]).expanduser(),
            texts=Path(flags["--texts"]).expanduser() if "--texts" in flags else None,
            reference=reference,
            answer_tokens=int(answer_tokens),
        )
        return options, words[1:]


def make_panel(
    options: PanelOptions, model_dir: Path, load_engine: Callable[[], Engine], progress: Progress
) -> str:
    """Make a panel and write it; gives one line that says what was written.

    load_engine: makes the server's engine on the calling thread; it is closed here. Raises Glm53Error.
    """
    from glm53srv.api.tokenizer import Tokenizer
    from glm53srv.model.config import load_model_config
    from glm53srv.model.vocabulary import count_token_ids

    tokenizer = Tokenizer.load(model_dir)
    num_ids = count_token_ids(model_dir, load_model_config(model_dir).vocab_size)
    texts = default_texts(tokenizer) if options.texts is None else read_texts(options.texts, tokenizer)
    if options.reference == "exllamav3":
        num_positions = write_panel(ReferenceModel(model_dir), texts, num_ids, options.out)
        return f"{options.out}: {len(texts)} texts, {num_positions} positions"
    engine = load_engine()
    try:
        reference = EngineReference(engine, f"glm53srv {type(engine).__name__}")
        answered = []
        for number, text in enumerate(texts):
            progress(number / len(texts), text.name)
            is_chat = text.chat is not None and options.answer_tokens > 0
            answered.append(reference.answer(text, options.answer_tokens) if is_chat else text)
        num_positions = write_panel(reference, answered, num_ids, options.out)
        progress(1.0, "done")
    finally:
        engine.close()
    return f"{options.out}: {len(texts)} texts, {num_positions} positions"
