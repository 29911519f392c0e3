"""Reading config.json: what is taken, and one clear line for everything that cannot be served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm53srv.errors import CheckpointError
from glm53srv.model.config import AttentionKind, MlpKind, load_model_config
from tests.model.checkpoints import edit_json


@pytest.fixture
def config_dir(random_model_dir: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((random_model_dir / name).read_bytes())
    return tmp_path


def test_sizes_and_layer_kinds_are_read(config_dir: Path) -> None:
    config = load_model_config(config_dir)
    assert (config.num_layers, config.hidden_size, config.max_context_tokens) == (8, 256, 8192)
    assert config.mla_layers == (3, 7)
    assert config.kda_layers == (0, 1, 2, 4, 5, 6)
    assert config.attention_kinds[3] is AttentionKind.MLA
    assert config.mlp_kinds == (MlpKind.DENSE, *[MlpKind.SPARSE] * 7)
    assert (config.indexer.topk_tokens, config.indexer.kpool, config.indexer.topk_pools) == (256, 4, 64)
    assert (config.moe.num_experts, config.moe.top_k, config.swiglu_limit) == (32, 4, 10.0)
    assert config.is_random


def test_published_configuration_is_accepted(shared_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((shared_dir / "fixtures" / "glm" / name).read_bytes())
    edit_json(
        tmp_path / "config.json",
        lambda value: value.update(quantization_config={"quant_method": "exl3", "codebook": "mul1"}),
    )
    config = load_model_config(tmp_path)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (45, 4096, 154880)
    assert len(config.mla_layers) == 11
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (1.0, 0.95, None)
    assert not config.is_random


def test_generation_config_may_be_absent(config_dir: Path) -> None:
    (config_dir / "generation_config.json").unlink()
    config = load_model_config(config_dir)
    assert len(config.eos_token_ids) == 3
    assert config.sampling.temperature is None


def test_generation_config_decides_the_end_ids(config_dir: Path) -> None:
    edit_json(config_dir / "generation_config.json", lambda value: value.update(eos_token_id=7))
    assert load_model_config(config_dir).eos_token_ids == (7,)


def _text(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["text_config"].update(changes)


def _linear(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["text_config"]["linear_attn_config"].update(changes)


def _drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["text_config"].pop(key)


BROKEN: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    (
        "architectures is LlamaForCausalLM; only Glm5NextForConditionalGeneration is served",
        lambda value: value.update(architectures=["LlamaForCausalLM"]),
    ),
    ("architectures is missing", lambda value: value.pop("architectures")),
    ("text_config is missing", lambda value: value.pop("text_config")),
    ("text_config must be an object", lambda value: value.update(text_config=3)),
    ("quantization_config is missing", lambda value: value.pop("quantization_config")),
    (
        "quantization_config.quant_method is 'awq'; only EXL3 checkpoints are served",
        lambda value: value["quantization_config"].update(quant_method="awq"),
    ),
    (
        "quantization_config.codebook is 'e8p'; known are 3inst, mcg and mul1",
        lambda value: value["quantization_config"].update(codebook="e8p"),
    ),
    (
        "tie_word_embeddings is True; a tied output head is not supported",
        lambda value: value.update(tie_word_embeddings=True),
    ),
    ("text_config.hidden_size is missing", _drop("hidden_size")),
    ("text_config.hidden_size is '256'; must be a whole number", _text(hidden_size="256")),
    ("text_config.hidden_size is 256.0; must be a whole number", _text(hidden_size=256.0)),
    ("text_config.hidden_size is True; must be a whole number", _text(hidden_size=True)),
    ("text_config.vocab_size is 0; must be 1 or more", _text(vocab_size=0)),
    ("text_config.rms_norm_eps is 0.0; must be above 0", _text(rms_norm_eps=0.0)),
    ("text_config.rms_norm_eps is 'small'; must be a number", _text(rms_norm_eps="small")),
    ("text_config.norm_topk_prob is 1; must be true or false", _text(norm_topk_prob=1)),
    ("text_config.qk_rope_head_dim is 64; rotary positions are not supported", _text(qk_rope_head_dim=64)),
    ("text_config.n_shared_experts is 2; exactly one shared", _text(n_shared_experts=2)),
    ("text_config.n_group is 8; routing by groups is not supported", _text(n_group=8)),
    (
        "text_config.scoring_func is 'softmax'; only a sigmoid router is supported",
        _text(scoring_func="softmax"),
    ),
    ("text_config.topk_method is 'greedy'; only noaux_tc routing is supported", _text(topk_method="greedy")),
    ("text_config.hc_mult is 2; the mixing kernels are written for 4 streams", _text(hc_mult=2)),
    ("text_config.mhc is False; checkpoints without hyper-connections are not supported", _text(mhc=False)),
    ("text_config.hidden_act is 'gelu'; only silu is supported", _text(hidden_act="gelu")),
    ("text_config.attention_bias is True; biases in attention are not supported", _text(attention_bias=True)),
    (
        "text_config.index_kpool_compress is False; only pooled indexer keys",
        _text(index_kpool_compress=False),
    ),
    ("text_config.index_topk is 255, not a multiple of index_kpool 4", _text(index_topk=255)),
    ("text_config.num_key_value_heads is 2, must equal num_attention_heads 4", _text(num_key_value_heads=2)),
    ("text_config.num_experts_per_tok is 33, more than n_routed_experts 32", _text(num_experts_per_tok=33)),
    ("text_config.layer_types has 1 entries for 8 layers", _text(layer_types=["linear_attention"])),
    ("text_config.layer_types[0] is 'mamba'; known are", _text(layer_types=["mamba"] * 8)),
    ("text_config.layer_types must be a list of strings", _text(layer_types="linear_attention")),
    ("text_config.mlp_layer_types[7] is 'wide'; known are", _text(mlp_layer_types=["sparse"] * 7 + ["wide"])),
    (
        "text_config.first_k_dense_replace is 3, which mlp_layer_types contradicts",
        _text(first_k_dense_replace=3),
    ),
    ("text_config.indexer_types[0] is 'shared'; only full indexers", _text(indexer_types=["shared"] * 8)),
    ("linear_attn_config.kda_layers does not name the same layers", _linear(kda_layers=[0, 1])),
    ("linear_attn_config.full_attn_layers does not name the same layers", _linear(full_attn_layers=[0])),
    ("linear_attn_config.head_dim is 64; the kernels are written for 128", _linear(head_dim=64)),
    ("linear_attn_config.gate_lower_bound is missing", _linear(gate_lower_bound=None)),
    ("linear_attn_config.gate_lower_bound is 5.0; must be below 0", _linear(gate_lower_bound=5.0)),
    (
        "linear_attn_config.short_conv_kernel_size is 3; only 4 is supported",
        _linear(short_conv_kernel_size=3),
    ),
]


@pytest.mark.parametrize(("message", "edit"), BROKEN, ids=[message for message, _ in BROKEN])
def test_what_cannot_be_served_is_one_line_with_file_and_key(
    config_dir: Path, message: str, edit: Callable[[dict[str, Any]], None]
) -> None:
    edit_json(config_dir / "config.json", edit)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(config_dir)
    text = str(caught.value)
    assert text.startswith(f"{config_dir}/config.json: ")
    assert message in text
    assert "\n" not in text


def test_end_id_outside_the_vocabulary_is_refused(config_dir: Path) -> None:
    edit_json(config_dir / "generation_config.json", lambda value: value.update(eos_token_id=[99999]))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id holds 99999, outside"):
        load_model_config(config_dir)


def test_missing_directory_and_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load_model_config(tmp_path)
