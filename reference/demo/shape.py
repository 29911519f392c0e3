"""Sizes of the demo model and its config.json, as exllamav3's converter and servers read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KDA = "linear_attention"
DSA = "deepseek_sparse_attention"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in GLM-5.3's terms (its config.json names them); all widths are multiples of 128 for EXL3."""

    vocab: int = 4096
    hidden: int = 256
    layer_types: tuple[str, ...] = (KDA, KDA, KDA, DSA, KDA, KDA, KDA, DSA)
    num_dense: int = 2
    intermediate: int = 512
    num_experts: int = 32
    top_k: int = 4
    moe_intermediate: int = 128
    routed_scaling: float = 2.5
    kda_heads: int = 2
    kda_dim: int = 128
    conv_taps: int = 4
    gate_lower_bound: float = -5.0
    heads: int = 4
    q_lora: int = 128
    kv_lora: int = 128
    nope_dim: int = 128
    v_dim: int = 128
    index_heads: int = 4
    index_dim: int = 128
    index_topk: int = 256
    index_kpool: int = 4
    swiglu_limit: float = 10.0
    norm_eps: float = 1e-5
    hc_mult: int = 4
    hc_iters: int = 20
    hc_eps: float = 1e-6

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)


TINY = Shape(
    vocab=4096,
    hidden=64,
    layer_types=(KDA, DSA),
    num_dense=1,
    intermediate=64,
    num_experts=8,
    top_k=2,
    moe_intermediate=32,
    kda_heads=2,
    kda_dim=32,
    heads=2,
    q_lora=32,
    kv_lora=32,
    nope_dim=32,
    v_dim=32,
    index_heads=2,
    index_dim=32,
    index_topk=16,
)
"""A shape for tests; not convertible (widths below 128)."""


def text_config(shape: Shape, eos_ids: list[int]) -> dict[str, Any]:
    """Write the text part of config.json."""
    mlp_types = ["dense"] * shape.num_dense + ["sparse"] * (shape.num_layers - shape.num_dense)
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 8192,
        "rms_norm_eps": shape.norm_eps,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_ids,
        "pad_token_id": eos_ids[0],
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": list(shape.layer_types),
        "linear_attn_config": {
            "num_heads": shape.kda_heads,
            "head_dim": shape.kda_dim,
            "short_conv_kernel_size": shape.conv_taps,
            "gate_lower_bound": shape.gate_lower_bound,
        },
        "linear_num_heads": shape.kda_heads,
        "linear_head_dim": shape.kda_dim,
        "linear_conv_kernel_dim": shape.conv_taps,
        "linear_lower_bound": shape.gate_lower_bound,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_lora,
        "kv_lora_rank": shape.kv_lora,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": 0,
        "qk_head_dim": shape.nope_dim,
        "v_head_dim": shape.v_dim,
        "head_dim": 0,
        "index_n_heads": shape.index_heads,
        "index_head_dim": shape.index_dim,
        "index_topk": shape.index_topk,
        "index_kpool": shape.index_kpool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * shape.num_layers,
        "first_k_dense_replace": shape.num_dense,
        "mlp_layer_types": mlp_types,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.moe_intermediate,
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.top_k,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "swiglu_limit": shape.swiglu_limit,
        "mhc": True,
        "hc_mult": shape.hc_mult,
        "hc_sinkhorn_iters": shape.hc_iters,
        "hc_eps": shape.hc_eps,
    }


def model_config(shape: Shape, eos_ids: list[int], media_ids: dict[str, int]) -> dict[str, Any]:
    """Write config.json. The vision tower is named because readers insist on it; there are no weights for
    it."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eos_token_id": eos_ids,
        **media_ids,
        "text_config": text_config(shape, eos_ids),
        "vision_config": {
            "model_type": "glm5_next_vision",
            "dtype": "bfloat16",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "depth": 1,
            "hidden_act": "silu",
            "hidden_size": 64,
            "image_size": 336,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": shape.hidden,
            "patch_size": 14,
            "projection_intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
            "spatial_merge_size": 2,
            "swiglu_limit": 10.0,
            "temporal_patch_size": 2,
        },
    }
