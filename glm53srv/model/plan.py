"""How much memory a CPU engine will need, before it takes any: pure arithmetic over the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from glm53srv.model.config import ModelConfig
from glm53srv.model.state import PAGE_TOKENS

_F32 = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose.

    mapped: weights read in place from the files; they count as page cache, and speed needs them to stay
    there. converted: weights of latent attention held as float32. cache: the paged cache when every page is
    in use. state: of all slots. activations: the largest arrays of one prefill chunk.
    """

    mapped_bytes: int
    converted_bytes: int
    cache_bytes: int
    state_bytes: int
    activation_bytes: int

    @property
    def private_bytes(self) -> int:
        """What the process allocates, without the mapped files."""
        return self.converted_bytes + self.cache_bytes + self.state_bytes + self.activation_bytes

    @property
    def total_bytes(self) -> int:
        """What the machine must have free for the engine to run at full speed."""
        return self.mapped_bytes + self.private_bytes


def plan_memory(
    config: ModelConfig, weight_bytes: int, num_pages: int, max_streams: int, max_chunk_tokens: int
) -> MemoryPlan:
    """Compute the plan. weight_bytes: size of the tensors the model reads (Checkpoint.needed_bytes)."""
    return MemoryPlan(
        mapped_bytes=weight_bytes,
        converted_bytes=_F32 * _converted_values(config),
        cache_bytes=num_pages * page_bytes(config),
        state_bytes=max_streams * state_bytes(config),
        activation_bytes=_F32 * max_chunk_tokens * _activation_values_per_token(config),
    )


def page_bytes(config: ModelConfig) -> int:
    """Give the size of one page of 256 tokens over all layers."""
    latent = PAGE_TOKENS * config.mla.kv_lora_rank
    pooled = PAGE_TOKENS // config.indexer.kpool * config.indexer.head_dim
    return _F32 * len(config.mla_layers) * (latent + pooled)


def state_bytes(config: ModelConfig) -> int:
    """Give the size of one slot's recurrent state."""
    kda, indexer = config.kda, config.indexer
    per_kda = (kda.conv_kernel - 1) * 3 * kda.width + kda.num_heads * kda.head_dim**2
    per_mla = 2 * indexer.kpool * indexer.head_dim
    return _F32 * (len(config.kda_layers) * per_kda + len(config.mla_layers) * per_mla)


def _converted_values(config: ModelConfig) -> int:
    mla = config.mla
    up_projections = mla.num_heads * (mla.nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    return len(config.mla_layers) * up_projections


def _activation_values_per_token(config: ModelConfig) -> int:
    """Estimate from above: streams before and after, and the widest layer's arrays with temporaries."""
    streams = 3 * config.hc.num_streams * config.hidden_size
    kda = 12 * config.kda.width
    mla = (
        3
        * config.mla.num_heads
        * (config.mla.nope_head_dim + config.mla.kv_lora_rank + config.mla.v_head_dim)
    )
    mlp = 4 * max(config.dense_size, config.moe.top_k * config.moe.expert_size)
    return streams + max(kda, mla, mlp)
