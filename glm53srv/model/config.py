"""The checkpoint's configuration: config.json and generation_config.json, checked and frozen.

Every key the model reads is read here, once. A key that is absent, of the wrong type, or asks for something
this package does not compute raises CheckpointError with one line that names the file and the key, before any
weight is touched. Sizes are never assumed: any checkpoint of the architecture loads, whatever its dimensions.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path

from glm53srv.errors import CheckpointError
from glm53srv.model.json_section import JsonSection

ARCHITECTURE = "Glm5NextForConditionalGeneration"
MODEL_TYPE = "glm5_next"
RANDOM_KIND = "random"
"""config.json, glm53srv.kind: weights drawn at random by model/pack.py."""


class AttentionKind(enum.Enum):
    """What mixes tokens in a layer; the values are those of text_config.layer_types."""

    KDA = "linear_attention"
    MLA = "deepseek_sparse_attention"


class MlpKind(enum.Enum):
    """What follows it; the values are those of text_config.mlp_layer_types."""

    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Linear attention with per-channel decay. gate_lower_bound: smallest log decay of one token."""

    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float

    @property
    def width(self) -> int:
        """Channels of each of q, k and v."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Latent attention without positions. kv_lora_rank: values cached per token and layer."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Which tokens latent attention reads: the top_k / kpool best pools of kpool tokens, and the tail."""

    num_heads: int
    head_dim: int
    topk_tokens: int
    kpool: int

    @property
    def topk_pools(self) -> int:
        """Pools selected at most."""
        return self.topk_tokens // self.kpool


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts of the sparse layers, and one shared expert of the same width."""

    num_experts: int
    top_k: int
    expert_size: int
    normalize_weights: bool
    weight_scale: float


@dataclass(frozen=True, slots=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: num_streams residual streams mixed at every site."""

    num_streams: int
    sinkhorn_iters: int
    eps: float


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json advises for requests that say nothing. None: the file is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text part of one checkpoint. Built by load_model_config, which guarantees that it can be computed.

    vocab_size counts the rows of lm_head, which may exceed the ids the tokenizer knows. is_random: the
    weights are noise, and what the model says means nothing.
    """

    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    attention_kinds: tuple[AttentionKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    dense_size: int
    swiglu_limit: float
    kda: KdaConfig
    mla: MlaConfig
    indexer: IndexerConfig
    moe: MoeConfig
    hc: HyperConnectionConfig
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    is_random: bool

    @property
    def num_layers(self) -> int:
        """Transformer blocks, without the layer for multi-token prediction."""
        return len(self.attention_kinds)

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a paged cache."""
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind is AttentionKind.MLA)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the layers with recurrent state."""
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind is AttentionKind.KDA)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read and check config.json and, if present, generation_config.json.

    Raises CheckpointError naming file and key.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: no such directory; name the folder that holds config.json")
    root = _read_json(model_dir / "config.json")
    _check_architecture(root)
    text = root.section("text_config")
    generation = (
        _read_json(model_dir / "generation_config.json")
        if (model_dir / "generation_config.json").is_file()
        else JsonSection(str(model_dir / "generation_config.json"), "", {})
    )
    _refuse_unsupported(text)
    attention_kinds = _attention_kinds(text)
    vocab_size = text.count("vocab_size")
    return ModelConfig(
        hidden_size=text.count("hidden_size"),
        vocab_size=vocab_size,
        max_context_tokens=text.count("max_position_embeddings"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        attention_kinds=attention_kinds,
        mlp_kinds=_mlp_kinds(text, len(attention_kinds)),
        dense_size=text.count("intermediate_size"),
        swiglu_limit=text.number("swiglu_limit", default=0.0),
        kda=_kda(text.section("linear_attn_config")),
        mla=MlaConfig(
            num_heads=text.count("num_attention_heads"),
            q_lora_rank=text.count("q_lora_rank"),
            kv_lora_rank=text.count("kv_lora_rank"),
            nope_head_dim=text.count("qk_nope_head_dim"),
            v_head_dim=text.count("v_head_dim"),
        ),
        indexer=_indexer(text),
        moe=_moe(text),
        hc=HyperConnectionConfig(
            num_streams=text.count("hc_mult"),
            sinkhorn_iters=text.count("hc_sinkhorn_iters"),
            eps=text.positive("hc_eps"),
        ),
        eos_token_ids=_eos_ids(generation, text, vocab_size),
        sampling=_sampling_defaults(generation),
        is_random=_is_random(root),
    )


def _read_json(path: Path) -> JsonSection:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); it belongs to the model"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return JsonSection(str(path), "", value)


def _check_architecture(root: JsonSection) -> None:
    root.require("model_type", MODEL_TYPE, f"only {MODEL_TYPE} is served")
    names = root.strings("architectures")
    if ARCHITECTURE not in names:
        raise root.error("architectures", f"is {', '.join(names) or 'empty'}; only {ARCHITECTURE} is served")
    quantization = root.section("quantization_config")
    quantization.require("quant_method", "exl3", "only EXL3 checkpoints are served")
    codebook = quantization.text("codebook", default="3inst")
    if codebook not in ("3inst", "default", "mcg", "mul1"):
        raise quantization.error("codebook", f"is {codebook!r}; known are 3inst, mcg and mul1")
    root.require("tie_word_embeddings", False, "a tied output head is not supported")


def _refuse_unsupported(text: JsonSection) -> None:
    """Stop at each feature of the architecture that the layers here do not compute."""
    text.require("mhc", True, "checkpoints without hyper-connections are not supported")
    text.require("hc_mult", 4, "the mixing kernels are written for 4 streams")
    text.require("hidden_act", "silu", "only silu is supported")
    text.require("attention_bias", False, "biases in attention are not supported")
    text.require("qk_rope_head_dim", 0, "rotary positions are not supported")
    text.require("scoring_func", "sigmoid", "only a sigmoid router is supported")
    text.require("topk_method", "noaux_tc", "only noaux_tc routing is supported")
    text.require("n_shared_experts", 1, "exactly one shared expert is supported")
    text.require("n_group", 1, "routing by groups is not supported")
    text.require("topk_group", 1, "routing by groups is not supported")
    text.require("index_kpool_compress", True, "only pooled indexer keys are supported")
    text.require("index_kpool_always_select_tail", True, "the newest unpooled tokens must be selected")
    heads, kv_heads = text.count("num_attention_heads"), text.count("num_key_value_heads")
    if heads != kv_heads:
        raise text.error("num_key_value_heads", f"is {kv_heads}, must equal num_attention_heads {heads}")


def _attention_kinds(text: JsonSection) -> tuple[AttentionKind, ...]:
    num_layers = text.count("num_hidden_layers")
    names = text.strings("layer_types", length=num_layers)
    known = {kind.value: kind for kind in AttentionKind}
    for index, name in enumerate(names):
        if name not in known:
            raise text.error(f"layer_types[{index}]", f"is {name!r}; known are {', '.join(sorted(known))}")
    for index, name in enumerate(text.strings("indexer_types", length=num_layers)):
        if name != "full":
            raise text.error(f"indexer_types[{index}]", f"is {name!r}; only full indexers are supported")
    kinds = tuple(known[name] for name in names)
    linear = text.section("linear_attn_config")
    for key, kind in (("full_attn_layers", AttentionKind.MLA), ("kda_layers", AttentionKind.KDA)):
        if linear.has(key) and linear.integers(key) != tuple(i for i, k in enumerate(kinds) if k is kind):
            raise linear.error(key, "does not name the same layers as text_config.layer_types")
    return kinds


def _mlp_kinds(text: JsonSection, num_layers: int) -> tuple[MlpKind, ...]:
    names = text.strings("mlp_layer_types", length=num_layers)
    known = {kind.value: kind for kind in MlpKind}
    for index, name in enumerate(names):
        if name not in known:
            raise text.error(f"mlp_layer_types[{index}]", f"is {name!r}; known are dense and sparse")
    num_dense = text.whole("first_k_dense_replace", default=names.count("dense"))
    if list(names) != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise text.error("first_k_dense_replace", f"is {num_dense}, which mlp_layer_types contradicts")
    return tuple(known[name] for name in names)


def _kda(linear: JsonSection) -> KdaConfig:
    lower_bound = linear.number("gate_lower_bound")
    if lower_bound >= 0:
        raise linear.error("gate_lower_bound", f"is {lower_bound}; must be below 0")
    conv_kernel = linear.count("short_conv_kernel_size")
    if conv_kernel != 4:
        raise linear.error("short_conv_kernel_size", f"is {conv_kernel}; only 4 is supported")
    head_dim = linear.count("head_dim")
    if head_dim != 128:
        raise linear.error("head_dim", f"is {head_dim}; the kernels are written for 128")
    return KdaConfig(
        num_heads=linear.count("num_heads"),
        head_dim=head_dim,
        conv_kernel=conv_kernel,
        gate_lower_bound=lower_bound,
    )


def _indexer(text: JsonSection) -> IndexerConfig:
    topk_tokens, kpool = text.count("index_topk"), text.count("index_kpool")
    if topk_tokens % kpool:
        raise text.error("index_topk", f"is {topk_tokens}, not a multiple of index_kpool {kpool}")
    return IndexerConfig(
        num_heads=text.count("index_n_heads"),
        head_dim=text.count("index_head_dim"),
        topk_tokens=topk_tokens,
        kpool=kpool,
    )


def _moe(text: JsonSection) -> MoeConfig:
    num_experts, top_k = text.count("n_routed_experts"), text.count("num_experts_per_tok")
    if top_k > num_experts:
        raise text.error("num_experts_per_tok", f"is {top_k}, more than n_routed_experts {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=text.count("moe_intermediate_size"),
        normalize_weights=text.boolean("norm_topk_prob"),
        weight_scale=text.positive("routed_scaling_factor"),
    )


def _eos_ids(generation: JsonSection, text: JsonSection, vocab_size: int) -> tuple[int, ...]:
    source = generation if generation.has("eos_token_id") else text
    ids = source.integers("eos_token_id")
    if not ids:
        raise source.error("eos_token_id", "is empty; generation would never stop")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise source.error("eos_token_id", f"holds {token_id}, outside the vocabulary of {vocab_size}")
    return ids


def _sampling_defaults(generation: JsonSection) -> SamplingDefaults:
    def number(key: str) -> float | None:
        return generation.number(key) if generation.has(key) else None

    return SamplingDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=generation.whole("top_k") if generation.has("top_k") else None,
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def _is_random(root: JsonSection) -> bool:
    return root.has("glm53srv") and root.section("glm53srv").text("kind", default="") == RANDOM_KIND
