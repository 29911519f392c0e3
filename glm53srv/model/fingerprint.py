"""Tells checkpoints apart by what decides the routes: the routers."""

from __future__ import annotations

import hashlib

from glm53srv.model.checkpoint import FLOATS, Checkpoint
from glm53srv.model.config import ModelConfig
from glm53srv.model.tensor_needs import layer_prefix


def routing_fingerprint(checkpoint: Checkpoint, config: ModelConfig, layers: tuple[int, ...]) -> str:
    """Digest the routers of the sparse layers: 32 hex digits.

    Two checkpoints with equal routers and different experts count as one: their heat is nearly the same.
    Reads every router (99 MB for GLM-5.3-Flash, which loading reads too). Raises CheckpointError.
    """
    moe, digest = config.moe, hashlib.blake2b(digest_size=16)
    digest.update(f"{layers} {moe.num_experts} {moe.top_k}".encode())
    for layer in layers:
        prefix = f"{layer_prefix(layer)}.mlp.gate"
        weight = checkpoint.raw(f"{prefix}.weight", (moe.num_experts, config.hidden_size), FLOATS)
        bias = checkpoint.raw(f"{prefix}.e_score_correction_bias", (moe.num_experts,), FLOATS)
        digest.update(weight.tobytes())
        digest.update(bias.tobytes())
    return digest.hexdigest()
