"""The names and number of tensors of the published checkpoints."""

from __future__ import annotations

from pathlib import Path

from glm53srv.model.checkpoint import Checkpoint, TensorNeed
from glm53srv.model.config import load_model_config
from glm53srv.model.tensor_needs import all_needs
from tests.model.checkpoints import edit_json

PLAIN_LINEARS = (
    *("self_attn.b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
    *("indexer.wk", "indexer.weights_proj"),
)


def test_published_model_needs_exactly_the_tensors_of_its_text_part(shared_dir: Path, tmp_path: Path) -> None:
    published = shared_dir / "fixtures" / "glm" / "config.json"
    (tmp_path / "config.json").write_bytes(published.read_bytes())
    edit_json(
        tmp_path / "config.json", lambda value: value.update(quantization_config={"quant_method": "exl3"})
    )
    names = set()
    for need in all_needs(load_model_config(tmp_path)):
        if isinstance(need, TensorNeed):
            names.add(need.name)
        elif need.key.endswith(PLAIN_LINEARS):
            names.add(f"{need.key}.weight")
        else:
            names.update(f"{need.key}.{part}" for part in ("trellis", "suh", "svh", "mul1"))
    # 147,017 in the shards and 22 pooling tensors in a file of their own.
    assert len(names) == 147_039
    assert sum(".indexer.index_kpool_compress_" in name for name in names) == 22
    assert "lm_head.trellis" in names
    assert not any(".layers.45." in name or "visual" in name for name in names)


def test_small_model_holds_every_tensor_that_is_needed_and_the_rest_is_not_text(shared_dir: Path) -> None:
    model_dir = shared_dir / "fixtures" / "tiny-random" / "checkpoint"
    checkpoint, config = Checkpoint(model_dir), load_model_config(model_dir)
    checkpoint.check(all_needs(config))
    needed = set()
    for need in all_needs(config):
        needed.add(need.name if isinstance(need, TensorNeed) else need.key)
    others = [
        name for name in checkpoint.names() if name not in needed and name.rpartition(".")[0] not in needed
    ]
    # What is left belongs to the layer for multi-token prediction.
    assert others
    assert all(name.startswith("model.language_model.layers.8.") for name in others)
