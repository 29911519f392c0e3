"""From a model directory to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from glm53srv.kernels import HyperConnection
from glm53srv.model.checkpoint import FLOATS, Checkpoint, LinearNeed, TensorNeed
from glm53srv.model.config import AttentionKind, MlpKind, ModelConfig, load_model_config
from glm53srv.model.decoder import Block, Decoder, Embedding
from glm53srv.model.indexer import KEY_NORM_EPS, Indexer, IndexerWeights
from glm53srv.model.kda import KdaAttention, KdaWeights
from glm53srv.model.linear import FloatLinear, GatedMlps, KernelContext, Linear, load_linear, load_mlps
from glm53srv.model.mla import MlaAttention, MlaWeights
from glm53srv.model.mlp import DenseMlp, Experts, Mlp, Router, SparseMlp
from glm53srv.model.norm import LayerNorm, RmsNorm
from glm53srv.model.ops import F32
from glm53srv.model.tensor_needs import EMBEDDING, FINAL_NORM, LM_HEAD, all_needs, layer_needs, layer_prefix

Progress = Callable[[float, str], None]


ExpertSource = Callable[[Checkpoint, int], Experts]
"""Gives the routed experts of a sparse layer, counted from 0, and the shared one after them."""

OpenExperts = Callable[[Checkpoint, ModelConfig], ExpertSource]


def load_decoder(
    model_dir: Path,
    context: KernelContext,
    progress: Progress | None = None,
    open_experts: OpenExperts | None = None,
) -> Decoder:
    """Map a checkpoint and build the text model over it.

    Everything is looked up before anything is built. progress: called with a fraction from 0 to 1 and the
    stage. open_experts: called once, when the checkpoint is known to be whole; None computes all experts in
    place, from the mapped files. Raises CheckpointError, one line naming file and key or tensor.
    """
    report = progress or (lambda fraction, stage: None)
    report(0.0, "reading the configuration")
    config = load_model_config(model_dir)
    report(0.05, "mapping weights")
    checkpoint = Checkpoint(model_dir)
    report(0.1, "checking tensors")
    checkpoint.check(all_needs(config))
    experts = None if open_experts is None else open_experts(checkpoint, config)
    blocks = []
    for layer in range(config.num_layers):
        report(0.15 + 0.85 * layer / config.num_layers, f"layer {layer + 1} of {config.num_layers}")
        blocks.append(_LayerReader(config, checkpoint, context, layer, experts).block())
    table = checkpoint.raw(EMBEDDING, (config.vocab_size, config.hidden_size), FLOATS)
    norm = RmsNorm(context, checkpoint.float32(FINAL_NORM, (config.hidden_size,)), config.rms_norm_eps)
    head = load_linear(context, checkpoint, LinearNeed(LM_HEAD, config.hidden_size, config.vocab_size))
    report(1.0, "ready")
    return Decoder(context, config, Embedding(table), blocks, norm, head)


class _LayerReader:
    """Builds one layer, with the shapes that tensor_needs states."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        context: KernelContext,
        layer: int,
        experts: ExpertSource | None,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._context = context
        self._layer = layer
        self._experts = experts
        self._prefix = layer_prefix(layer)
        self._linears: dict[str, LinearNeed] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for need in layer_needs(config, layer):
            if isinstance(need, TensorNeed):
                self._shapes[need.name] = need.shape
            else:
                self._linears[need.key] = need

    def block(self) -> Block:
        """Give the layer."""
        is_kda = self._config.attention_kinds[self._layer] is AttentionKind.KDA
        is_dense = self._config.mlp_kinds[self._layer] is MlpKind.DENSE
        return Block(
            attention_site=self._site("hc_attn"),
            attention_norm=self._norm("input_layernorm.weight"),
            attention=self._kda() if is_kda else self._mla(),
            mlp_site=self._site("hc_ffn"),
            mlp_norm=self._norm("post_attention_layernorm.weight"),
            mlp=DenseMlp(self._networks(["mlp"])) if is_dense else self._sparse_mlp(),
        )

    def _tensor(self, name: str) -> F32:
        full_name = f"{self._prefix}.{name}"
        return self._checkpoint.float32(full_name, self._shapes[full_name])

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._context, self._tensor(name), self._config.rms_norm_eps)

    def _plain(self, name: str) -> FloatLinear:
        full_name = f"{self._prefix}.{name}"
        return FloatLinear(self._context, self._checkpoint.plain(full_name, self._shapes[full_name]))

    def _linear(self, key: str) -> Linear:
        return load_linear(self._context, self._checkpoint, self._linears[f"{self._prefix}.{key}"])

    def _networks(self, keys: list[str]) -> GatedMlps:
        needs = [
            [self._linears[f"{self._prefix}.{key}.{part}_proj"] for part in ("gate", "up", "down")]
            for key in keys
        ]
        return load_mlps(self._context, self._checkpoint, needs, self._config.swiglu_limit)

    def _site(self, name: str) -> HyperConnection:
        hc = self._config.hc
        return HyperConnection(
            fn=self._tensor(f"{name}_fn"),
            base=self._tensor(f"{name}_base"),
            scale=self._tensor(f"{name}_scale"),
            sinkhorn_iters=hc.sinkhorn_iters,
            eps=hc.eps,
            norm_eps=self._config.rms_norm_eps,
        )

    def _kda(self) -> KdaAttention:
        kda = self._config.kda
        weights = KdaWeights(
            qkv=self._linear("self_attn.qkv_proj"),
            taps=np.ascontiguousarray(self._tensor("self_attn.conv1d.weight")[:, 0].T),
            forget_a=self._linear("self_attn.f_a_proj"),
            forget_b=self._linear("self_attn.f_b_proj"),
            decay_rate=np.exp(self._tensor("self_attn.A_log"))[:, None],
            dt_bias=self._tensor("self_attn.dt_bias").reshape(kda.num_heads, kda.head_dim),
            beta=self._linear("self_attn.b_proj"),
            gate_a=self._linear("self_attn.g_a_proj"),
            gate_b=self._linear("self_attn.g_b_proj"),
            output_norm=self._norm("self_attn.o_norm.weight"),
            output=self._linear("self_attn.o_proj"),
        )
        return KdaAttention(self._context, kda, weights)

    def _mla(self) -> MlaAttention:
        mla = self._config.mla
        up = self._tensor("self_attn.kv_b_proj.weight")
        up = up.reshape(mla.num_heads, mla.nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        weights = MlaWeights(
            query_a=self._linear("self_attn.q_a_proj"),
            query_norm=self._norm("self_attn.q_a_layernorm.weight"),
            query_b=self._linear("self_attn.q_b_proj"),
            latent=self._linear("self_attn.kv_a_proj_with_mqa"),
            latent_norm=self._norm("self_attn.kv_a_layernorm.weight"),
            key_up=np.ascontiguousarray(up[:, : mla.nope_head_dim]),
            value_up=np.ascontiguousarray(up[:, mla.nope_head_dim :].swapaxes(1, 2)),
            output=self._linear("self_attn.o_proj"),
        )
        return MlaAttention(self._context, mla, weights, self._indexer())

    def _indexer(self) -> Indexer:
        weights = IndexerWeights(
            query=self._linear("self_attn.indexer.wq_b"),
            key=self._linear("self_attn.indexer.wk"),
            gate=self._plain("self_attn.indexer.index_kpool_compress_gate"),
            head_weights=self._linear("self_attn.indexer.weights_proj"),
            key_norm=LayerNorm(
                self._tensor("self_attn.indexer.k_norm.weight"),
                self._tensor("self_attn.indexer.k_norm.bias"),
                KEY_NORM_EPS,
            ),
            position_bias=self._tensor("self_attn.indexer.index_kpool_compress_ape"),
        )
        return Indexer(self._config.indexer, weights)

    def _sparse_mlp(self) -> Mlp:
        moe = self._config.moe
        logits = self._plain("mlp.gate.weight")
        router = Router(moe, logits, self._tensor("mlp.gate.e_score_correction_bias"))
        if self._experts is not None:
            sparse_layer = self._config.mlp_kinds[: self._layer].count(MlpKind.SPARSE)
            return SparseMlp(router, self._experts(self._checkpoint, sparse_layer))
        routed = [f"mlp.experts.{expert}" for expert in range(moe.num_experts)]
        return SparseMlp(router, self._networks([*routed, "mlp.shared_experts"]))
