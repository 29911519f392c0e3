"""The tensors a checkpoint must hold, by name and shape: the naming of this architecture, in one place.

Names follow the published EXL3 checkpoints, which fuse q, k, v and their convolutions of a linear attention
layer. The layer for multi-token prediction (index num_layers) and the vision tower are in the same files and
are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

from glm53srv.model.checkpoint import LinearNeed, TensorNeed
from glm53srv.model.config import AttentionKind, MlpKind, ModelConfig

Need = TensorNeed | LinearNeed

TEXT = "model.language_model"
EMBEDDING = f"{TEXT}.embed_tokens.weight"
FINAL_NORM = f"{TEXT}.norm.weight"
LM_HEAD = "lm_head"


def layer_prefix(layer_idx: int) -> str:
    """Give the start of the names of one layer."""
    return f"{TEXT}.layers.{layer_idx}"


def all_needs(config: ModelConfig) -> Iterator[Need]:
    """List everything the text model reads."""
    yield TensorNeed(EMBEDDING, (config.vocab_size, config.hidden_size))
    for layer_idx in range(config.num_layers):
        yield from layer_needs(config, layer_idx)
    yield TensorNeed(FINAL_NORM, (config.hidden_size,))
    yield LinearNeed(LM_HEAD, config.hidden_size, config.vocab_size)


def layer_needs(config: ModelConfig, layer_idx: int) -> Iterator[Need]:
    """List what one layer reads."""
    prefix, hidden = layer_prefix(layer_idx), config.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield TensorNeed(f"{prefix}.{norm}.weight", (hidden,))
    streams = config.hc.num_streams
    mixes = streams * (2 + streams)
    for site in ("hc_attn", "hc_ffn"):
        yield TensorNeed(f"{prefix}.{site}_fn", (mixes, streams * hidden))
        yield TensorNeed(f"{prefix}.{site}_base", (mixes,))
        yield TensorNeed(f"{prefix}.{site}_scale", (3,))
    if config.attention_kinds[layer_idx] is AttentionKind.KDA:
        yield from _kda_needs(config, f"{prefix}.self_attn")
    else:
        yield from _mla_needs(config, f"{prefix}.self_attn")
        yield from _indexer_needs(config, f"{prefix}.self_attn.indexer")
    if config.mlp_kinds[layer_idx] is MlpKind.DENSE:
        yield from mlp_needs(f"{prefix}.mlp", hidden, config.dense_size)
    else:
        yield from _moe_needs(config, f"{prefix}.mlp")


def mlp_needs(prefix: str, hidden: int, width: int) -> Iterator[LinearNeed]:
    """List the linears of one gated feed-forward network: gate, up, down, for the fused kernel."""
    yield LinearNeed(f"{prefix}.gate_proj", hidden, width, must_be_quantized=True)
    yield LinearNeed(f"{prefix}.up_proj", hidden, width, must_be_quantized=True)
    yield LinearNeed(f"{prefix}.down_proj", width, hidden, must_be_quantized=True)


def _kda_needs(config: ModelConfig, prefix: str) -> Iterator[Need]:
    kda, hidden = config.kda, config.hidden_size
    yield LinearNeed(f"{prefix}.qkv_proj", hidden, 3 * kda.width)
    yield LinearNeed(f"{prefix}.o_proj", kda.width, hidden)
    yield LinearNeed(f"{prefix}.b_proj", hidden, kda.num_heads)
    for gate in ("f", "g"):
        yield LinearNeed(f"{prefix}.{gate}_a_proj", hidden, kda.head_dim)
        yield LinearNeed(f"{prefix}.{gate}_b_proj", kda.head_dim, kda.width)
    yield TensorNeed(f"{prefix}.conv1d.weight", (3 * kda.width, 1, kda.conv_kernel))
    yield TensorNeed(f"{prefix}.A_log", (kda.num_heads,))
    yield TensorNeed(f"{prefix}.dt_bias", (kda.width,))
    yield TensorNeed(f"{prefix}.o_norm.weight", (kda.head_dim,))


def _mla_needs(config: ModelConfig, prefix: str) -> Iterator[Need]:
    mla, hidden = config.mla, config.hidden_size
    yield LinearNeed(f"{prefix}.q_a_proj", hidden, mla.q_lora_rank)
    yield TensorNeed(f"{prefix}.q_a_layernorm.weight", (mla.q_lora_rank,))
    yield LinearNeed(f"{prefix}.q_b_proj", mla.q_lora_rank, mla.num_heads * mla.nope_head_dim)
    yield LinearNeed(f"{prefix}.kv_a_proj_with_mqa", hidden, mla.kv_lora_rank)
    yield TensorNeed(f"{prefix}.kv_a_layernorm.weight", (mla.kv_lora_rank,))
    kv_width = mla.num_heads * (mla.nope_head_dim + mla.v_head_dim)
    yield TensorNeed(f"{prefix}.kv_b_proj.weight", (kv_width, mla.kv_lora_rank))
    yield LinearNeed(f"{prefix}.o_proj", mla.num_heads * mla.v_head_dim, hidden)


def _indexer_needs(config: ModelConfig, prefix: str) -> Iterator[Need]:
    indexer, hidden = config.indexer, config.hidden_size
    yield LinearNeed(f"{prefix}.wq_b", config.mla.q_lora_rank, indexer.num_heads * indexer.head_dim)
    yield LinearNeed(f"{prefix}.wk", hidden, indexer.head_dim)
    yield LinearNeed(f"{prefix}.weights_proj", hidden, indexer.num_heads)
    yield TensorNeed(f"{prefix}.k_norm.weight", (indexer.head_dim,))
    yield TensorNeed(f"{prefix}.k_norm.bias", (indexer.head_dim,))
    yield TensorNeed(f"{prefix}.index_kpool_compress_ape", (indexer.kpool, indexer.head_dim))
    yield TensorNeed(f"{prefix}.index_kpool_compress_gate", (indexer.head_dim, hidden))


def _moe_needs(config: ModelConfig, prefix: str) -> Iterator[Need]:
    moe, hidden = config.moe, config.hidden_size
    yield TensorNeed(f"{prefix}.gate.weight", (moe.num_experts, hidden))
    yield TensorNeed(f"{prefix}.gate.e_score_correction_bias", (moe.num_experts,))
    for expert in range(moe.num_experts):
        yield from mlp_needs(f"{prefix}.experts.{expert}", hidden, moe.expert_size)
    yield from mlp_needs(f"{prefix}.shared_experts", hidden, moe.expert_size)
