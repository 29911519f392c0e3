"""The published checkpoint without its bytes: every tensor of every file in its place, all of them holes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

from glm53srv.model.checkpoint import TensorNeed
from glm53srv.model.config import ARCHITECTURE, MODEL_TYPE
from glm53srv.model.published import PUBLISHED, stored_bits, stored_item_bytes
from glm53srv.model.tensor_needs import all_needs

NUM_SHARDS = 15


def write_full_size(folder: Path, small_model: Path) -> Path:
    """Write it into an empty folder; the tokenizer is the small model's. Takes 2 s and 20 MB on the disk."""
    tensors = list(_tensors())
    per_shard = -(-len(tensors) // NUM_SHARDS)
    for shard in range(NUM_SHARDS):
        header: dict[str, object] = {}
        end = 0
        for name, dtype, shape, num_bytes in tensors[shard * per_shard : (shard + 1) * per_shard]:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
            end += num_bytes
        text = json.dumps(header).encode()
        with (folder / f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + end)
    (folder / "config.json").write_text(json.dumps(_config()))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 1.0, "top_p": 0.95}))
    shutil.copy(small_model / "tokenizer.json", folder)
    return folder


def _tensors() -> Iterator[tuple[str, str, list[int], int]]:
    """Give name, dtype, shape and size."""
    for need in all_needs(PUBLISHED):
        if isinstance(need, TensorNeed):
            size = stored_item_bytes(need.name)
            yield need.name, "F32" if size == 4 else "F16", list(need.shape), size * prod(need.shape)
            continue
        rows, columns, bits = need.in_features, need.out_features, stored_bits(need.key)
        if bits is None:
            yield f"{need.key}.weight", "F16", [columns, rows], 2 * rows * columns
            continue
        shape = [rows // 16, columns // 16, 16 * bits]
        yield f"{need.key}.trellis", "I16", shape, 2 * prod(shape)
        yield f"{need.key}.suh", "F16", [rows], 2 * rows
        yield f"{need.key}.svh", "F16", [columns], 2 * columns


def _config() -> dict[str, object]:
    model = PUBLISHED
    text = {
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_context_tokens,
        "rms_norm_eps": model.rms_norm_eps,
        "num_hidden_layers": model.num_layers,
        "layer_types": [kind.value for kind in model.attention_kinds],
        "indexer_types": ["full"] * model.num_layers,
        "mlp_layer_types": [kind.value for kind in model.mlp_kinds],
        "intermediate_size": model.dense_size,
        "swiglu_limit": model.swiglu_limit,
        "linear_attn_config": {
            "num_heads": model.kda.num_heads,
            "head_dim": model.kda.head_dim,
            "short_conv_kernel_size": model.kda.conv_kernel,
            "gate_lower_bound": model.kda.gate_lower_bound,
        },
        "num_attention_heads": model.mla.num_heads,
        "num_key_value_heads": model.mla.num_heads,
        "q_lora_rank": model.mla.q_lora_rank,
        "kv_lora_rank": model.mla.kv_lora_rank,
        "qk_nope_head_dim": model.mla.nope_head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": model.mla.v_head_dim,
        "index_n_heads": model.indexer.num_heads,
        "index_head_dim": model.indexer.head_dim,
        "index_topk": model.indexer.topk_tokens,
        "index_kpool": model.indexer.kpool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "n_routed_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.expert_size,
        "norm_topk_prob": model.moe.normalize_weights,
        "routed_scaling_factor": model.moe.weight_scale,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "mhc": True,
        "hc_mult": model.hc.num_streams,
        "hc_sinkhorn_iters": model.hc.sinkhorn_iters,
        "hc_eps": model.hc.eps,
        "eos_token_id": list(model.eos_token_ids),
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "exl3"},
        "text_config": text,
    }
