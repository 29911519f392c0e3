"""Write a training checkpoint as a Hugging Face directory that exllamav3's converter reads (upstream names,
bf16)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from glm53srv.model.pack_tokenizer import EOS_TOKENS
from reference.demo.model import (
    Block,
    DemoModel,
    DenseMlp,
    DsaAttention,
    HyperConnection,
    KdaAttention,
    MtpLayer,
    SparseMlp,
)
from reference.demo.shape import Shape, model_config
from reference.demo.tokenizer import token_id

PREFIX = "model.language_model."
PROCESSOR = {
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
_MEDIA = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}


def _kda(prefix: str, layer: KdaAttention, out: dict[str, Tensor]) -> None:
    for name, part in zip("qkv", layer.qkv_proj.weight.chunk(3), strict=True):
        out[f"{prefix}{name}_proj.weight"] = part
    for name, part in zip("qkv", layer.conv.chunk(3), strict=True):
        out[f"{prefix}{name}_conv1d.weight"] = part[:, None, :]
    for name in ("o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"):
        out[f"{prefix}{name}.weight"] = getattr(layer, name).weight
    out[f"{prefix}A_log"] = layer.a_log
    out[f"{prefix}dt_bias"] = layer.dt_bias
    out[f"{prefix}o_norm.weight"] = layer.o_norm


def _dsa(prefix: str, layer: DsaAttention, out: dict[str, Tensor]) -> None:
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        out[f"{prefix}{name}.weight"] = getattr(layer, name).weight
    out[f"{prefix}q_a_layernorm.weight"] = layer.q_a_layernorm
    out[f"{prefix}kv_a_layernorm.weight"] = layer.kv_a_layernorm
    indexer = layer.indexer
    for name in ("wq_b", "wk", "weights_proj"):
        out[f"{prefix}indexer.{name}.weight"] = getattr(indexer, name).weight
    out[f"{prefix}indexer.k_norm.weight"] = indexer.k_norm.weight
    out[f"{prefix}indexer.k_norm.bias"] = indexer.k_norm.bias
    out[f"{prefix}indexer.index_kpool_compress_ape"] = indexer.ape
    out[f"{prefix}indexer.index_kpool_compress_gate"] = indexer.gate


def _mlp(prefix: str, layer: DenseMlp | SparseMlp, out: dict[str, Tensor]) -> None:
    parts = ("gate_proj", "up_proj", "down_proj")
    if isinstance(layer, DenseMlp):
        for name in parts:
            out[f"{prefix}{name}.weight"] = getattr(layer, name).weight
        return
    out[f"{prefix}gate.weight"] = layer.gate.weight
    out[f"{prefix}gate.e_score_correction_bias"] = layer.bias - layer.bias.mean()
    for name in parts:
        for expert, weight in enumerate(getattr(layer, name).weight):
            out[f"{prefix}experts.{expert}.{name}.weight"] = weight
    _mlp(f"{prefix}shared_experts.", layer.shared_experts, out)


def _hyper(prefix: str, site: HyperConnection, out: dict[str, Tensor]) -> None:
    out[f"{prefix}_fn"], out[f"{prefix}_base"], out[f"{prefix}_scale"] = site.fn, site.base, site.scale


def _layer(prefix: str, layer: Block | MtpLayer, out: dict[str, Tensor]) -> None:
    out[f"{prefix}input_layernorm.weight"] = layer.input_layernorm
    out[f"{prefix}post_attention_layernorm.weight"] = layer.post_attention_layernorm
    if isinstance(layer.self_attn, KdaAttention):
        _kda(f"{prefix}self_attn.", layer.self_attn, out)
    else:
        _dsa(f"{prefix}self_attn.", layer.self_attn, out)
    _mlp(f"{prefix}mlp.", layer.mlp, out)
    if isinstance(layer, Block):
        _hyper(f"{prefix}hc_attn", layer.hc_attn, out)
        _hyper(f"{prefix}hc_ffn", layer.hc_ffn, out)


def upstream_tensors(model: DemoModel) -> dict[str, Tensor]:
    """Give every tensor under its upstream name (fp32, shared with the model)."""
    out: dict[str, Tensor] = {
        f"{PREFIX}embed_tokens.weight": model.embed_tokens,
        f"{PREFIX}norm.weight": model.norm,
        "lm_head.weight": model.lm_head.weight,
    }
    for index, layer in enumerate(model.layers):
        _layer(f"{PREFIX}layers.{index}.", layer, out)
    prefix = f"{PREFIX}layers.{model.shape.num_layers}."
    _layer(prefix, model.mtp, out)
    out[f"{prefix}enorm.weight"], out[f"{prefix}hnorm.weight"] = model.mtp.enorm, model.mtp.hnorm
    out[f"{prefix}eh_proj.weight"] = model.mtp.eh_proj.weight
    out[f"{prefix}shared_head.norm.weight"] = model.mtp.head_norm
    return {name: tensor.detach() for name, tensor in out.items()}


def is_kept_fp32(name: str) -> bool:
    """Say which tensors lose too much in bf16 (the upstream checkpoint keeps the same ones)."""
    small = ("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight")
    return name.endswith(small) or "_fn" in name or "_base" in name or "_scale" in name


def config_for(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    """Write config.json for a tokenizer's ids."""
    eos = [token_id(tokenizer, token) for token in EOS_TOKENS]
    media = {key: token_id(tokenizer, token) for key, token in _MEDIA.items()}
    return model_config(shape, eos, media)


def write_directory(model: DemoModel, files: Path, directory: Path) -> None:
    """Write weights and configuration; `files` holds tokenizer and template. Weights are rounded to bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.float32 if is_kept_fp32(name) else torch.bfloat16).contiguous().cpu().clone()
        for name, tensor in upstream_tensors(model).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    config = config_for(model.shape, tokenizer)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "processor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if files != directory:
            shutil.copy(files / name, directory / name)
