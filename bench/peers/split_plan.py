"""How many experts of each sparse layer a card of some size holds under stock exllamav3's expert split.

    | other weights | KV cache and states | context, scratch | a prefill chunk | experts, as many each layer |

The package splits every sparse layer at the same number (moe_cpu_split), so what fits is counted whole layers
at a time. Computed for the whole model even where only its first layers run: with the few experts of a
shortened model, the card would hold most of them, and neither engine would do what it is measured for.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.errors import BadInput
from glm53srv.engine.cuda.synthetic_plan import device_bytes, synthetic_layout
from glm53srv.machine import GIB
from glm53srv.model.config import AttentionKind, ModelConfig
from glm53srv.offload.vram_plan import plan_vram

SCRATCH_BYTES = 1_700_000_000
"""CUDA's context, kernels, cuBLAS and the package's scratch: what an H200 held beyond weights, cache and
states with 45 layers loaded (13.81 of 24 GiB were free for experts), measured 29 November 2026."""
OUR_SCRATCH_BYTES = SCRATCH_BYTES + 340_000_000
"""In our engine as of 30 November 2026, whose graphs and buffers take their share: an H200 then had 13.50 GiB
left beside the whole cache."""
CHUNK_BYTES = 2 * GIB
"""Activations of a prefill chunk, which stock keeps room for at all times. With it the plan gives the 31 of
288 experts that users of the package fit on a 24 GB card with -mcs 257."""
STATE_SLOTS = 5
"""Recurrent states: four streams and one spare, in both engines."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """gpu_experts: of each sparse layer, on the card; the CPU has the others. Bytes: of the whole model."""

    gpu_experts: int
    num_experts: int
    vram_bytes: int
    other_bytes: int
    cache_bytes: int
    layer_bytes: int

    @property
    def cpu_experts(self) -> int:
        """Experts of each sparse layer that the CPU computes."""
        return self.num_experts - self.gpu_experts

    def __str__(self) -> str:
        return (
            f"{self.gpu_experts} of {self.num_experts} experts a layer on the card: of "
            f"{self.vram_bytes / GIB:.1f} GiB, {self.other_bytes / GIB:.2f} other weights, "
            f"{self.cache_bytes / GIB:.2f} cache and states, {(SCRATCH_BYTES + CHUNK_BYTES) / GIB:.2f} "
            f"scratch and a chunk, {self.layer_bytes / GIB:.2f} for one expert of every layer"
        )


def cache_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Give the bytes of a float16 cache of num_tokens and of the recurrent states (cache/mla.py and
    modules/gated_delta_net.py of exllamav3 1.5.1)."""
    indexer, kda = config.indexer, config.kda
    # Per token: the latent, two index keys, and a pooled key for every kpool tokens.
    per_token = 2 * (config.mla.kv_lora_rank + 2 * indexer.head_dim) + 2 * indexer.head_dim // indexer.kpool
    per_state = 4 * kda.num_heads * kda.head_dim**2 + 2 * 3 * kda.width * kda.conv_kernel
    kinds = config.attention_kinds
    return (
        kinds.count(AttentionKind.MLA) * num_tokens * per_token
        + kinds.count(AttentionKind.KDA) * STATE_SLOTS * per_state
    )


def our_experts(config: ModelConfig, vram_bytes: int, cache_tokens: int, chunk_tokens: int) -> int:
    """Count experts a layer that our cache holds on such a card while little of the KV cache is filled.

    By the server's own division, in fast mode. chunk_tokens: of a prefill chunk; pages for so many have
    memory from the start. Raises MachineError where not even a chunk of slots fits.
    """
    _, geometry = synthetic_layout(config)
    embedding = 2 * config.vocab_size * config.hidden_size
    late = cache_bytes(config, cache_tokens) - cache_bytes(config, min(cache_tokens, chunk_tokens + 256))
    taken = device_bytes(config) - embedding + cache_bytes(config, cache_tokens) + OUR_SCRATCH_BYTES
    plan = plan_vram(geometry, vram_bytes - taken + late, "fast", page_bytes=late)
    return plan.num_slots // geometry.num_layers


def plan_split(config: ModelConfig, vram_bytes: int, cache_tokens: int) -> SplitPlan:
    """Fit as many experts a layer as vram_bytes hold; at least one, as the package wants, and at most all.

    config: of the whole model. Raises BadInput where not even one fits.
    """
    layout, geometry = synthetic_layout(config)
    embedding = 2 * config.vocab_size * config.hidden_size  # in host memory, in both engines
    other = device_bytes(config) - embedding
    cache = cache_bytes(config, cache_tokens)
    layer_bytes = geometry.num_layers * layout.record_bytes
    room = vram_bytes - other - cache - SCRATCH_BYTES - CHUNK_BYTES
    if room < layer_bytes:
        need = (vram_bytes - room + layer_bytes) / GIB
        raise BadInput(
            f"{vram_bytes / GIB:.1f} GiB of VRAM hold no expert beside the other weights and a cache of "
            f"{cache_tokens} tokens, {need:.1f} would hold one a layer: raise --vram or lower --cache-tokens"
        )
    fitting = min(room // layer_bytes, geometry.num_experts)
    return SplitPlan(fitting, geometry.num_experts, vram_bytes, other, cache, layer_bytes)
