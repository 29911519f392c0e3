"""A random EXL3 checkpoint of the served architecture, for where no model can be fetched.

Any bits are valid EXL3 codes, and codes drawn at random decode to weights of about N(0, 1), so the packer
draws trellis words directly and sets the scale of each matrix through svh. What such a model says means
nothing; it marks itself as random (config.json, glm53srv.kind).

The bytes depend on the seed and the tensor names alone: every tensor has its own PCG64 stream, read as raw
words (numpy promises those stable over versions, its distributions not).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from glm53srv.errors import ConfigError
from glm53srv.model.checkpoint import HADAMARD, MUL1_MULTIPLIER, TILE, LinearNeed, TensorNeed
from glm53srv.model.config import RANDOM_KIND, load_model_config
from glm53srv.model.pack_config import config_json, generation_json, processor_json
from glm53srv.model.pack_tokenizer import EOS_TOKENS, PAD_TOKEN, SPECIAL_TOKENS, TEXT_TOKENS, train_tokenizer
from glm53srv.model.safetensors_writer import NamedTensor, write_safetensors
from glm53srv.model.tensor_needs import LM_HEAD, all_needs

RANDOM_FORMAT = 2
"""Raised whenever the same seed would give other bytes."""

Progress = Callable[[float, str], None]

_BITS, _HEAD_BITS = 3, 6
QUANTIZED = (
    *("qkv_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "wq_b"),
    *("gate_proj", "up_proj", "down_proj", "lm_head"),
)
"""Ends of the names of the linears that a published checkpoint stores quantised."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a tensor is drawn: mean + spread * N(0, 1), stored as dtype (f4, f2 or bf16)."""

    mean: float
    spread: float
    dtype: str


# By the end of the name, first match; a spread of None stands for 1 / sqrt(inputs). Chosen so that streams,
# gates and logits keep the sizes of a trained model: decays from one token to hundreds, router scores apart,
# logits of standard deviation 2.5.
_DRAWS: tuple[tuple[str, float, float | None, str], ...] = (
    ("embed_tokens.weight", 0.0, 1.0, "bf16"),
    ("k_norm.weight", 1.0, 0.1, "f2"),
    ("k_norm.bias", 0.0, 0.1, "f2"),
    ("norm.weight", 1.0, 0.1, "bf16"),
    ("_fn", 0.0, 0.02, "f4"),
    ("_base", 0.0, 0.5, "f4"),
    ("_scale", 1.0, 0.1, "f4"),
    ("conv1d.weight", 0.25, 0.4, "f4"),
    ("A_log", 0.4, 0.3, "f4"),
    ("dt_bias", -3.0, 1.0, "f4"),
    ("e_score_correction_bias", 0.0, 0.05, "f4"),
    ("compress_ape", 0.0, 0.5, "f4"),
    ("weight", 0.0, None, "f2"),
    ("compress_gate", 0.0, None, "f2"),
)
_HEAD_GAIN = 2.5
# Relative gains of single rows of lm_head. Single bytes and control tokens would break the text, so their
# logits are 0, far below the largest; the ends of reasoning and of a turn come up after some tens of tokens.
_ENDING_GAINS = {"</think>": 2.0, "<|user|>": 1.6, "<|endoftext|>": 1.2}


def pack_random_model(out_dir: Path, seed: int = 0, progress: Progress | None = None) -> None:
    """Write a random model to out_dir, all of it or nothing.

    An earlier random model there is replaced; any other non-empty directory is refused with ConfigError.
    progress: called with a fraction from 0 to 1 and the stage. The same seed gives the same bytes.
    """
    report = progress or (lambda fraction, stage: None)
    _refuse_foreign(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        report(0.0, "training a tokenizer")
        tokenizer = train_tokenizer()
        _write_json_files(work_dir, tokenizer, seed)
        tensors = _draw_tensors(work_dir, tokenizer, seed, report)
        report(0.9, "writing weights")
        write_safetensors(work_dir / "model.safetensors", tensors)
        _write_json(work_dir / "quantization_config.json", _storage(work_dir, tensors))
        work_dir.chmod(0o755)  # mkdtemp gives 0o700, but a model is for everyone
        _replace(work_dir, out_dir)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    report(1.0, "done")


def is_random_model(model_dir: Path, seed: int = 0) -> bool:
    """Tell whether model_dir holds what pack_random_model(model_dir, seed) would write."""
    return _marker(model_dir) == {"kind": RANDOM_KIND, "seed": seed, "format": RANDOM_FORMAT}


def _marker(model_dir: Path) -> object:
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config.get("glm53srv") if isinstance(config, dict) else None


def _refuse_foreign(out_dir: Path) -> None:
    if not out_dir.exists() and not out_dir.is_symlink():
        return
    marker = _marker(out_dir)
    is_ours = isinstance(marker, dict) and marker.get("kind") == RANDOM_KIND
    if not out_dir.is_dir() or (not is_ours and any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir}: exists and is not a random model; choose another directory with --out")


def _replace(work_dir: Path, out_dir: Path) -> None:
    """Put work_dir in out_dir's place; a reader sees the old model or the new one, briefly neither."""
    if out_dir.exists():
        old_dir = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old.", dir=out_dir.parent))
        out_dir.rename(old_dir)
        work_dir.rename(out_dir)
        shutil.rmtree(old_dir)
    else:
        work_dir.rename(out_dir)


def _write_json_files(work_dir: Path, tokenizer: Tokenizer, seed: int) -> None:
    ids = {text: _token_id(tokenizer, text) for text in SPECIAL_TOKENS + TEXT_TOKENS}
    # Like the published head, it has more rows than the tokenizer has ids: those must never be sampled.
    vocab_size = -(-(tokenizer.get_vocab_size() + 1) // HADAMARD) * HADAMARD
    eos_ids = [ids[text] for text in EOS_TOKENS]
    config = config_json(vocab_size, ids, eos_ids, ids[PAD_TOKEN])
    config["glm53srv"] = {"kind": RANDOM_KIND, "seed": seed, "format": RANDOM_FORMAT}
    _write_json(work_dir / "config.json", config)
    _write_json(work_dir / "generation_config.json", generation_json(eos_ids, ids[PAD_TOKEN]))
    _write_json(work_dir / "processor_config.json", processor_json())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKENS[0],
        "pad_token": PAD_TOKEN,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": list(SPECIAL_TOKENS),
    }
    _write_json(work_dir / "tokenizer_config.json", tokenizer_config)
    (work_dir / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")


def _draw_tensors(work_dir: Path, tokenizer: Tokenizer, seed: int, report: Progress) -> list[NamedTensor]:
    needs = tuple(all_needs(load_model_config(work_dir)))
    tensors: list[NamedTensor] = []
    for index, need in enumerate(needs):
        if index % 64 == 0:
            report(0.1 + 0.8 * index / len(needs), "drawing weights")
        if isinstance(need, TensorNeed):
            tensors.append(_plain(need.name, need.shape, seed))
        elif need.key.endswith(QUANTIZED):
            gains = _head_gains(need, tokenizer) if need.key == LM_HEAD else 1.0
            tensors += _quantized(need, seed, gains)
        else:
            tensors.append(_plain(f"{need.key}.weight", (need.out_features, need.in_features), seed))
    return tensors


def _token_id(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_to_id(text)
    if token_id is None:
        raise AssertionError(f"the trained tokenizer lost {text}")
    return int(token_id)


def _head_gains(need: LinearNeed, tokenizer: Tokenizer) -> NDArray[np.float64]:
    """Give the gain of each logit: 0 where a token alone is no text."""
    gains = np.zeros(need.out_features)
    for text, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if len(text) > 1:
            gains[token_id] = _HEAD_GAIN
    for text, gain in _ENDING_GAINS.items():
        gains[_token_id(tokenizer, text)] = _HEAD_GAIN * gain
    return gains


def _quantized(need: LinearNeed, seed: int, gains: NDArray[np.float64] | float) -> list[NamedTensor]:
    """Draw the four tensors of a linear whose outputs have standard deviation gains for inputs of 1."""
    key, rows, columns = need.key, need.in_features, need.out_features
    bits = _HEAD_BITS if key == LM_HEAD else _BITS
    words = _raw_words(f"{key}.trellis", seed, rows * columns * bits // 64)
    trellis = words.astype("<u8").view("<i2").reshape(rows // TILE, columns // TILE, TILE * bits)
    scale = np.broadcast_to(np.asarray(gains, np.float64) / np.sqrt(rows), (columns,))
    multiplier = np.array(MUL1_MULTIPLIER, np.uint32).view(np.int32)
    return [
        NamedTensor(f"{key}.trellis", trellis),
        NamedTensor(f"{key}.suh", _signs(f"{key}.suh", seed, rows).astype(np.float16)),
        NamedTensor(f"{key}.svh", (_signs(f"{key}.svh", seed, columns) * scale).astype(np.float16)),
        NamedTensor(f"{key}.mul1", multiplier),
    ]


def _plain(name: str, shape: tuple[int, ...], seed: int) -> NamedTensor:
    draw = draw_rule(name, shape)
    count = int(np.prod(shape))
    values = (draw.mean + draw.spread * _normals(name, seed, count)).astype(np.float32).reshape(shape)
    if draw.dtype == "bf16":
        return NamedTensor(name, (values.view(np.uint32) >> 16).astype(np.uint16))
    return NamedTensor(name, values.astype(draw.dtype))


def draw_rule(name: str, shape: tuple[int, ...]) -> Draw:
    """Say how a plain tensor of this name is drawn, here and by the synthetic model of a GPU benchmark."""
    for ending, mean, spread, dtype in _DRAWS:
        if name.endswith(ending):
            return Draw(mean, shape[-1] ** -0.5 if spread is None else spread, dtype)
    raise AssertionError(f"no rule to draw {name}")


def _raw_words(name: str, seed: int, count: int) -> NDArray[np.uint64]:
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return np.asarray(np.random.PCG64(entropy).random_raw(count), np.uint64)


def _normals(name: str, seed: int, count: int) -> NDArray[np.float64]:
    """Draw about N(0, 1): the sum of four uniform 16-bit numbers, exact in any numpy version."""
    quarters = _raw_words(name, seed, count).astype("<u8").view("<u2").reshape(count, 4)
    sums = quarters.sum(axis=1, dtype=np.int64).astype(np.float64)
    return np.asarray((sums / 65536.0 - (2.0 - 2.0 / 65536.0)) * 3.0**0.5, np.float64)


def _signs(name: str, seed: int, count: int) -> NDArray[np.float64]:
    return 1.0 - 2.0 * (_raw_words(name, seed, count) >> np.uint64(63)).astype(np.float64)


def _storage(work_dir: Path, tensors: list[NamedTensor]) -> dict[str, Any]:
    """Give the content of quantization_config.json: the header values and every stored tensor by module."""
    header: dict[str, Any] = json.loads((work_dir / "config.json").read_bytes())["quantization_config"]
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I16": "int16", "I32": "int32"}
    modules: dict[str, Any] = {}
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        entry = modules.setdefault(module, {"stored_tensors": {}})
        entry["stored_tensors"][tensor.name] = {
            "shape": list(tensor.data.shape),
            "n_bytes": tensor.data.nbytes,
            "dtype": f"torch.{names[tensor.dtype]}",
        }
        if last == "trellis":
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = tensor.data.shape[2] // TILE
            entry["mul1_multiplier"] = MUL1_MULTIPLIER
    return {**header, "tensor_storage": modules}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
