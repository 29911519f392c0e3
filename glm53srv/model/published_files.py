"""The published model's configuration files, cut to its first layers: for a model of random weights.

The numbers come from published.PUBLISHED; what stands beside them here is what exllamav3's reader of the same
files asks for (architecture/glm5_next.py of 1.5.1), which the text model computes nothing with.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm53srv.errors import ConfigError
from glm53srv.model.config import AttentionKind, MlpKind, ModelConfig
from glm53srv.model.pack_config import generation_json, processor_json
from glm53srv.model.published import PUBLISHED

PAD_TOKEN_ID = 154_820
FEWEST_LAYERS = PUBLISHED.mlp_kinds.index(MlpKind.SPARSE) + 1
"""The first sparse layer is also the first of full attention: fewer layers leave a kind of each out."""

_KIND_NAMES = {AttentionKind.KDA: "linear_attention", AttentionKind.MLA: "deepseek_sparse_attention"}
_MLP_NAMES = {MlpKind.DENSE: "dense", MlpKind.SPARSE: "sparse"}
_VISION = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "depth": 24,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "image_size": 448,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "glm5_next_vision",
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "projection_intermediate_size": 10240,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "swiglu_limit": 10.0,
    "temporal_patch_size": 2,
}


def write_published_files(target: Path, num_layers: int | None = None) -> None:
    """Write to a directory what both readers of a configuration want, and a weights file without a tensor.

    num_layers: of the model's first ones, None for all. Raises ConfigError for a number that is not there.
    """
    config = published_config(num_layers)
    _write(target / "config.json", config)
    _write(target / "processor_config.json", processor_json())
    _write(
        target / "generation_config.json",
        generation_json(config["text_config"]["eos_token_id"], PAD_TOKEN_ID),
    )
    header = b'{"__metadata__":{"format":"pt"}}'
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def published_model(num_layers: int | None = None) -> ModelConfig:
    """Give the published model cut to its first num_layers layers. Raises ConfigError for a wrong number."""
    most = PUBLISHED.num_layers
    count = most if num_layers is None else num_layers
    if not FEWEST_LAYERS <= count <= most:
        raise ConfigError(
            f"--layers {count}: from {FEWEST_LAYERS}, the first with routed experts, to {most}, all there are"
        )
    return replace(
        PUBLISHED,
        attention_kinds=PUBLISHED.attention_kinds[:count],
        mlp_kinds=PUBLISHED.mlp_kinds[:count],
    )


def published_config(num_layers: int | None = None) -> dict[str, Any]:
    """Give config.json of the quantised model, without its layer for multi-token prediction."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "image_token_id": 154_854,
        "image_start_token_id": 154_830,
        "image_end_token_id": 154_831,
        "video_token_id": 154_855,
        "video_start_token_id": 154_832,
        "video_end_token_id": 154_833,
        "tie_word_embeddings": False,
        "text_config": _text_config(published_model(num_layers)),
        "vision_config": dict(_VISION),
        "quantization_config": {"quant_method": "exl3", "bits": 3.05, "codebook": "mul1"},
    }


def _text_config(model: ModelConfig) -> dict[str, Any]:
    attention, mlps, num_layers = model.attention_kinds, model.mlp_kinds, model.num_layers
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 0,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_context_tokens,
        "rms_norm_eps": model.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": list(model.eos_token_ids),
        "pad_token_id": PAD_TOKEN_ID,
        "layer_types": [_KIND_NAMES[kind] for kind in attention],
        "mlp_layer_types": [_MLP_NAMES[kind] for kind in mlps],
        "first_k_dense_replace": mlps.count(MlpKind.DENSE),
        "intermediate_size": model.dense_size,
        "swiglu_limit": model.swiglu_limit,
        "mhc": True,
        "hc_mult": model.hc.num_streams,
        "hc_sinkhorn_iters": model.hc.sinkhorn_iters,
        "hc_eps": model.hc.eps,
        **_linear_attention(model, attention),
        **_latent_attention(model, num_layers),
        **_experts(model),
    }


def _linear_attention(model: ModelConfig, kinds: tuple[AttentionKind, ...]) -> dict[str, Any]:
    def places(kind: AttentionKind) -> list[int]:
        return [layer for layer, found in enumerate(kinds) if found is kind]

    return {
        "linear_attn_config": {
            "num_heads": model.kda.num_heads,
            "head_dim": model.kda.head_dim,
            "short_conv_kernel_size": model.kda.conv_kernel,
            "gate_lower_bound": model.kda.gate_lower_bound,
            "full_attn_layers": places(AttentionKind.MLA),
            "kda_layers": places(AttentionKind.KDA),
        }
    }


def _latent_attention(model: ModelConfig, num_layers: int) -> dict[str, Any]:
    mla, indexer = model.mla, model.indexer
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_head_dim,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": mla.v_head_dim,
        "head_dim": 0,
        "mla_use_nope": True,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk_tokens,
        "index_kpool": indexer.kpool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["full"] * num_layers,
    }


def _experts(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.weight_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
