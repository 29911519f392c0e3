"""The published model, GLM-5.3-Flash at 3.05 bits per weight, as numbers: for planning without its files.

Dimensions: config.json of zai-org/GLM-5.3-Flash. Storage: the tensor table of turboderp/GLM-5.3-Flash-exl3,
branch 3.05bpw, at download.PUBLISHED_REVISION. Nothing that is served reads this file.
"""

from __future__ import annotations

from glm53srv.model.config import (
    AttentionKind,
    HyperConnectionConfig,
    IndexerConfig,
    KdaConfig,
    MlaConfig,
    MlpKind,
    ModelConfig,
    MoeConfig,
    SamplingDefaults,
)

_NUM_LAYERS = 45
_FULL_ATTENTION = range(3, _NUM_LAYERS, 4)
_NUM_DENSE = 3

PUBLISHED = ModelConfig(
    hidden_size=4096,
    vocab_size=154_880,
    max_context_tokens=1_048_576,
    rms_norm_eps=1e-5,
    attention_kinds=tuple(
        AttentionKind.MLA if layer_idx in _FULL_ATTENTION else AttentionKind.KDA
        for layer_idx in range(_NUM_LAYERS)
    ),
    mlp_kinds=(MlpKind.DENSE,) * _NUM_DENSE + (MlpKind.SPARSE,) * (_NUM_LAYERS - _NUM_DENSE),
    dense_size=12_288,
    swiglu_limit=10.0,
    kda=KdaConfig(num_heads=64, head_dim=128, conv_kernel=4, gate_lower_bound=-5.0),
    mla=MlaConfig(num_heads=64, q_lora_rank=1536, kv_lora_rank=512, nope_head_dim=256, v_head_dim=256),
    indexer=IndexerConfig(num_heads=32, head_dim=128, topk_tokens=2048, kpool=4),
    moe=MoeConfig(num_experts=288, top_k=8, expert_size=2048, normalize_weights=True, weight_scale=2.5),
    hc=HyperConnectionConfig(num_streams=4, sinkhorn_iters=20, eps=1e-6),
    eos_token_ids=(154_820, 154_827, 154_829),
    sampling=SamplingDefaults(temperature=1.0, top_p=0.95),
    is_random=False,
)

_FIVE_BITS = ("qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "wq_b", "o_proj")
_FLOAT32 = ("_fn", "_base", "_scale", "A_log", "dt_bias", "conv1d.weight", "correction_bias", "compress_ape")


def stored_bits(key: str) -> int | None:
    """Give K of a linear, or None for one that is stored in float16."""
    if ".mlp.experts." in key:
        return 3
    if ".shared_experts." in key or key.rpartition(".")[2] in _FIVE_BITS:
        return 5
    if ".mlp." in key:
        return 4
    return 6 if key == "lm_head" else None


def stored_item_bytes(name: str) -> int:
    """Give the size of one value of a plain tensor: float32, or two bytes."""
    return 4 if name.endswith(_FLOAT32) else 2
