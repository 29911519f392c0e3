"""Reading safetensors files: views without copies, and one line naming file and tensor for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53srv.errors import CheckpointError
from glm53srv.model.checkpoint import (
    Checkpoint,
    CodebookName,
    LinearNeed,
    PlainLinear,
    QuantizedLinear,
    TensorNeed,
)
from glm53srv.model.config import load_model_config
from glm53srv.model.tensor_needs import LM_HEAD, all_needs
from tests.model.checkpoints import copy_model, edit_header, read_file, write_file

LAYER = "model.language_model.layers.1"
EXPERT = f"{LAYER}.mlp.experts.5.gate_proj"
WEIGHTS = "model.safetensors"


@pytest.fixture
def model_dir(random_model_dir: Path, tmp_path: Path) -> Path:
    return copy_model(random_model_dir, tmp_path / "model")


def check_error(model_dir: Path) -> str:
    """Give the line with which a model directory is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(model_dir).check(all_needs(load_model_config(model_dir)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_model_passes_and_other_tensors_are_ignored(model_dir: Path) -> None:
    extra = {"model.visual.blocks.0.weight": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}
    write_file(model_dir / "vision.safetensors", extra, b"\0" * 4)
    Checkpoint(model_dir).check(all_needs(load_model_config(model_dir)))


def test_index_file_is_not_consulted(model_dir: Path) -> None:
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    Checkpoint(model_dir).check(all_needs(load_model_config(model_dir)))


def test_quantized_linear_is_a_view_of_the_file(model_dir: Path) -> None:
    header, data = read_file(model_dir / WEIGHTS)
    begin, end = header[f"{EXPERT}.trellis"]["data_offsets"]
    linear = Checkpoint(model_dir).linear(LinearNeed(EXPERT, 256, 128))
    assert isinstance(linear, QuantizedLinear)
    assert (linear.in_features, linear.out_features, linear.codebook) == (256, 128, CodebookName.MUL1)
    assert linear.trellis.tobytes() == data[begin:end]
    assert not linear.trellis.flags.owndata
    assert not linear.trellis.flags.writeable


def test_plain_linear_keeps_its_form_and_bfloat16_is_widened(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    half = values.astype(np.float16)
    header = {
        "a.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
        "b.weight": {"dtype": "F16", "shape": [2, 2], "data_offsets": [8, 16]},
    }
    write_file(tmp_path / WEIGHTS, header, bits.tobytes() + half.tobytes())
    checkpoint = Checkpoint(tmp_path)
    a, b = checkpoint.linear(LinearNeed("a", 2, 2)), checkpoint.linear(LinearNeed("b", 2, 2))
    assert isinstance(a, PlainLinear)
    assert isinstance(b, PlainLinear)
    assert np.array_equal(a.weight, values)
    assert b.weight.dtype == np.float16
    assert np.array_equal(checkpoint.float32("b.weight", (2, 2)), values)


def test_signs_stored_as_bits_are_unpacked(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    negative = rng.integers(0, 2, 128).astype(np.uint8)
    bits = np.packbits(negative, bitorder="little")  # lowest bit first, 1 for -1
    trellis = rng.integers(0, 2**16, 8 * 8 * 48, dtype=np.uint16)
    header = {
        "k.trellis": {"dtype": "I16", "shape": [8, 8, 48], "data_offsets": [0, 6144]},
        "k.su": {"dtype": "I16", "shape": [8], "data_offsets": [6144, 6160]},
        "k.sv": {"dtype": "I16", "shape": [8], "data_offsets": [6160, 6176]},
    }
    write_file(tmp_path / WEIGHTS, header, trellis.tobytes() + bits.tobytes() + (~bits).tobytes())
    need = LinearNeed("k", 128, 128)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check([need])
    linear = checkpoint.quantized(need)
    assert linear.codebook is CodebookName.DEFAULT
    assert np.array_equal(linear.suh, 1.0 - 2.0 * negative)
    assert np.array_equal(linear.svh, 2.0 * negative - 1.0)


def test_no_directory_and_no_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        Checkpoint(tmp_path)


def test_missing_tensors_are_listed_with_their_number(model_dir: Path) -> None:
    def drop_norms(header: dict[str, Any]) -> None:
        for layer in range(8):
            del header[f"model.language_model.layers.{layer}.input_layernorm.weight"]

    edit_header(model_dir / WEIGHTS, drop_norms)
    text = check_error(model_dir)
    assert "tensors are missing: model.language_model.layers.0.input_layernorm.weight, " in text
    assert "and 5 more" in text


@pytest.mark.parametrize("part", ["trellis", "suh", "svh"])
def test_missing_part_of_a_linear_is_named(model_dir: Path, part: str) -> None:
    edit_header(model_dir / WEIGHTS, lambda header: header.pop(f"{EXPERT}.{part}"))
    assert f"tensors are missing: {EXPERT}.{part};" in check_error(model_dir)


def test_tensor_in_two_files_is_refused(model_dir: Path) -> None:
    (model_dir / "more.safetensors").write_bytes((model_dir / WEIGHTS).read_bytes())
    text = check_error(model_dir)
    assert "more.safetensors" in text
    assert f"is also in {WEIGHTS}" in text or "is also in more.safetensors" in text


def test_cut_file_names_the_first_tensor_that_is_not_whole(model_dir: Path) -> None:
    path = model_dir / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])
    text = check_error(model_dir)
    assert f"{path}: truncated: " in text
    assert f"of {path.stat().st_size}; fetch the file again" in text


@pytest.mark.parametrize("size", [0, 5, 8, 200])
def test_file_cut_inside_its_header(model_dir: Path, size: int) -> None:
    path = model_dir / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    assert f"{path}: truncated" in check_error(model_dir)


def test_git_lfs_pointer_is_recognised(model_dir: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 125179521581\n"
    (model_dir / WEIGHTS).write_text(pointer)
    assert "is a git-lfs pointer, not the weights; run `git lfs pull`" in check_error(model_dir)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 64, "not a safetensors file (header of 18446744073709551615 bytes)"),
        (b"\x04\0\0\0\0\0\0\0nope", "not a safetensors file (its header is not JSON)"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors file (its header is not an object)"),
    ],
)
def test_other_files_are_told_apart(model_dir: Path, content: bytes, message: str) -> None:
    (model_dir / WEIGHTS).write_bytes(content)
    assert message in check_error(model_dir)


def _set(name: str, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(changes)


BROKEN_HEADERS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    (f"{EXPERT}.suh: has dtype BF16, expected F16", _set(f"{EXPERT}.suh", dtype="BF16")),
    (f"{EXPERT}.suh: has shape [2, 128], config.json asks for [256]", _set(f"{EXPERT}.suh", shape=[2, 128])),
    (
        f"{EXPERT}.trellis: has shape [8, 16, 48], config.json asks for [16, 8, 16 K]",
        _set(f"{EXPERT}.trellis", shape=[8, 16, 48]),
    ),
    (
        f"{EXPERT}.trellis: K = 0.5 bits is not supported with codebook mul1",
        _set(f"{EXPERT}.trellis", shape=[16, 8, 8], data_offsets=[0, 2048]),
    ),
    (
        f"{LAYER}.hc_attn_fn: has shape [1024, 24], config.json asks for [24, 1024]",
        _set(f"{LAYER}.hc_attn_fn", shape=[1024, 24]),
    ),
    (
        f"{LAYER}.hc_attn_fn: has dtype I32, expected F32 or F16 or BF16",
        _set(f"{LAYER}.hc_attn_fn", dtype="I32"),
    ),
    (f"{EXPERT}.suh: unknown dtype 'F4'", _set(f"{EXPERT}.suh", dtype="F4")),
    (f"{EXPERT}.suh: holds 512 bytes, its shape [255] needs 510", _set(f"{EXPERT}.suh", shape=[255])),
    (f"{EXPERT}.suh: malformed header entry", _set(f"{EXPERT}.suh", data_offsets=[-2, 510])),
    (f"{EXPERT}.suh: malformed header entry", _set(f"{EXPERT}.suh", shape=["256"])),
]


@pytest.mark.parametrize(("message", "edit"), BROKEN_HEADERS, ids=[message for message, _ in BROKEN_HEADERS])
def test_wrong_shape_dtype_or_entry_is_named(
    model_dir: Path, message: str, edit: Callable[[dict[str, Any]], None]
) -> None:
    edit_header(model_dir / WEIGHTS, edit)
    assert f"{model_dir / WEIGHTS}: {message}" in check_error(model_dir)


def test_half_bits_need_the_mul1_codebook(tmp_path: Path) -> None:
    need = LinearNeed("k", 128, 128)
    size = 8 * 8 * 40 * 2
    header: dict[str, Any] = {
        "k.trellis": {"dtype": "I16", "shape": [8, 8, 40], "data_offsets": [0, size]},
        "k.suh": {"dtype": "F16", "shape": [128], "data_offsets": [0, 256]},
        "k.svh": {"dtype": "F16", "shape": [128], "data_offsets": [0, 256]},
    }
    write_file(tmp_path / WEIGHTS, header, b"\0" * size)
    with pytest.raises(CheckpointError, match=r"K = 2\.5 bits is not supported with codebook 3inst"):
        Checkpoint(tmp_path).check([need])
    header["k.mul1"] = {"dtype": "I32", "shape": [], "data_offsets": [size, size + 4]}
    write_file(tmp_path / WEIGHTS, header, b"\0" * size + (0x83DCD12D).to_bytes(4, "little"))
    Checkpoint(tmp_path).check([need])


def test_unknown_multiplier_and_two_codebooks_are_refused(model_dir: Path) -> None:
    header, data = read_file(model_dir / WEIGHTS)
    begin = header[f"{EXPERT}.mul1"]["data_offsets"][0]
    write_file(model_dir / WEIGHTS, header, data[:begin] + b"\x01\x02\x03\x04" + data[begin + 4 :])
    assert f"{EXPERT}.mul1: unknown codebook multiplier 0x04030201" in check_error(model_dir)
    mcg = {"dtype": "I32", "shape": [], "data_offsets": [len(data), len(data) + 4]}
    header[f"{EXPERT}.mcg"] = mcg
    write_file(model_dir / WEIGHTS, header, data + (0xCBAC1FED).to_bytes(4, "little"))
    assert f"{EXPERT}: names two codebooks, mcg and mul1" in check_error(model_dir)


def test_plain_experts_and_odd_sizes_are_refused(model_dir: Path, tmp_path: Path) -> None:
    def make_plain(header: dict[str, Any]) -> None:
        header[f"{EXPERT}.weight"] = header.pop(f"{EXPERT}.trellis")

    edit_header(model_dir / WEIGHTS, make_plain)
    assert f"tensors are missing: {EXPERT}.trellis;" in check_error(model_dir)
    header = {"k.trellis": {"dtype": "I16", "shape": [4, 8, 16], "data_offsets": [0, 1024]}}
    write_file(tmp_path / WEIGHTS, header, b"\0" * 1024)
    with pytest.raises(CheckpointError, match="64 x 128 is not in multiples of 128"):
        Checkpoint(tmp_path).check([LinearNeed("k", 64, 128)])


def test_absent_tensor_is_named_when_read(model_dir: Path) -> None:
    checkpoint = Checkpoint(model_dir)
    with pytest.raises(CheckpointError, match=r"nothing: is in none of the \.safetensors files"):
        checkpoint.float32("nothing", (1,))
    with pytest.raises(CheckpointError, match=r"nothing: has neither \.trellis nor \.weight"):
        checkpoint.linear(LinearNeed("nothing", 1, 1))


def test_needed_bytes_counts_what_is_read(model_dir: Path) -> None:
    checkpoint = Checkpoint(model_dir)
    needs: list[LinearNeed | TensorNeed] = [
        LinearNeed(LM_HEAD, 256, 2304),
        TensorNeed("model.language_model.norm.weight", (256,)),
    ]
    assert checkpoint.needed_bytes(needs) == 256 * 2304 * 6 // 8 + 2 * (256 + 2304) + 2 * 256
