"""The configuration files of a random model: GLM-5.3-Flash's structure at a size that loads in a moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_LAYERS = 8
HIDDEN_SIZE = 256
CONTEXT_TOKENS = 8192
_FULL_ATTENTION_EVERY = 4


def config_json(
    vocab_size: int, token_ids: Mapping[str, int], eos_ids: list[int], pad_id: int
) -> dict[str, Any]:
    """Give the content of config.json. token_ids: id of each control token by its text."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "glm5_next",
        "text_config": _text_config(vocab_size, eos_ids, pad_id),
        "vision_config": _vision_config(),
        "tie_word_embeddings": False,
        "image_token_id": token_ids["<|image|>"],
        "image_start_token_id": token_ids["<|begin_of_image|>"],
        "image_end_token_id": token_ids["<|end_of_image|>"],
        "video_token_id": token_ids["<|video|>"],
        "video_start_token_id": token_ids["<|begin_of_video|>"],
        "video_end_token_id": token_ids["<|end_of_video|>"],
        "eos_token_id": eos_ids,
        "quantization_config": {
            "quant_method": "exl3",
            "version": "1.5.1",
            "bits": 3.0,
            "head_bits": 6,
            "calibration": {"rows": 0, "cols": 0},
            "out_scales": "always",
            "codebook": "mul1",
        },
    }


def generation_json(eos_ids: list[int], pad_id: int) -> dict[str, Any]:
    """Give the content of generation_config.json: the sampling defaults of the published model."""
    return {"eos_token_id": eos_ids, "pad_token_id": pad_id, "temperature": 1.0, "top_p": 0.95}


def processor_json() -> dict[str, Any]:
    """Give the content of processor_config.json, which exllamav3 wants and the text model does not read."""
    return {
        "image_processor": {
            "image_processor_type": "Glm5NextImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "min_image_tokens": 4,
            "max_image_tokens": 64,
        }
    }


def _vision_config() -> dict[str, Any]:
    """Give the smallest picture tower's sizes: exllamav3 wants them, nothing of it is in the files."""
    return {
        "model_type": "glm5_next_vision",
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
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": 14,
        "projection_intermediate_size": 64,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        "spatial_merge_size": 2,
        "swiglu_limit": 10.0,
        "temporal_patch_size": 2,
    }


def _text_config(vocab_size: int, eos_ids: list[int], pad_id: int) -> dict[str, Any]:
    layers = range(NUM_LAYERS)
    full = [i for i in layers if i % _FULL_ATTENTION_EVERY == _FULL_ATTENTION_EVERY - 1]
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": 0,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": eos_ids,
        "pad_token_id": pad_id,
        "layer_types": ["deepseek_sparse_attention" if i in full else "linear_attention" for i in layers],
        "mlp_layer_types": ["dense" if i == 0 else "sparse" for i in layers],
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "swiglu_limit": 10.0,
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "full_attn_layers": full,
            "kda_layers": [i for i in layers if i not in full],
        },
        **_attention_config(),
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "mhc": True,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
    }


def _attention_config() -> dict[str, Any]:
    """Give the keys of latent attention and its indexer."""
    return {
        "attention_bias": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_head_dim": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 0,
        "v_head_dim": 128,
        "head_dim": 0,
        "mla_use_nope": True,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 256,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * NUM_LAYERS,
    }
