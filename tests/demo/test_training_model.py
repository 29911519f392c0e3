"""The training model against transformers' implementation (needs torch and transformers, not in make
test)."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from reference.demo.export import PREFIX, upstream_tensors  # noqa: E402
from reference.demo.model import DemoModel, Functions, Run, make_packing  # noqa: E402
from reference.demo.shape import TINY, text_config  # noqa: E402


def random_model() -> Any:
    """A tiny model in which nothing is at its neutral starting value."""
    torch.manual_seed(0)
    model = DemoModel(TINY)
    with torch.no_grad():
        for layer in model.layers:
            if hasattr(layer.mlp, "bias"):
                layer.mlp.bias.normal_(0, 0.02)
                layer.mlp.bias -= layer.mlp.bias.mean()
            if hasattr(layer.self_attn, "indexer"):
                layer.self_attn.indexer.ape.normal_(0, 0.5)
                layer.self_attn.indexer.k_norm.bias.normal_(0, 0.1)
    return model


def to_transformers(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename upstream tensors to those of transformers, as its loader does."""
    out: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX) or f"layers.{TINY.num_layers}." in name:
            continue
        name = re.sub(r"hc_(attn|ffn)_(fn|base|scale)", r"\1_hc.\2", name.removeprefix(PREFIX))
        name = re.sub(r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name)
        found = re.match(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        else:
            out[name] = tensor
    for key in [name for name in out if "q_conv1d" in name]:
        parts = [out.pop(key.replace("q_conv1d", f"{part}_conv1d")) for part in "qkv"]
        out[key.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    stacks = {key: torch.stack([group[i] for i in sorted(group)]) for key, group in experts.items()}
    for key in [name for name in stacks if name.endswith(".gate")]:
        base = key.removesuffix(".gate")
        out[f"{base}.gate_up_proj"] = torch.cat([stacks[key], stacks[f"{base}.up"]], dim=1)
        out[f"{base}.down_proj"] = stacks[f"{base}.down"]
    return out


def hidden_states(model: Any, ids: Any, doc: Any) -> Any:
    with torch.no_grad():
        return model.trunk(ids, Run(Functions(), make_packing(doc))).unflatten(0, ids.shape)


def test_trunk_agrees_with_transformers_in_the_dense_and_sparse_range() -> None:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    model = random_model()
    settings = {key: value for key, value in text_config(TINY, [1, 2, 3]).items() if key != "model_type"}
    config = Glm5NextTextConfig(**settings)
    config._attn_implementation = "eager"
    reference = Glm5NextTextModel(config).float().eval()
    reference.load_state_dict(to_transformers(upstream_tensors(model)), strict=True)
    ids = torch.randint(0, TINY.vocab, (2, 72))

    ours = hidden_states(model, ids, torch.zeros_like(ids))
    with torch.no_grad():
        theirs = reference(input_ids=ids).last_hidden_state

    # fp32 on both sides; sums in other orders differ by about 1e-6
    assert torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4), (ours - theirs).abs().max()


def test_packed_documents_do_not_see_each_other() -> None:
    model = random_model()
    ids = torch.randint(0, TINY.vocab, (1, 40))
    doc = torch.tensor([[0] * 24 + [1] * 16])  # short enough that no pool is cut: random indexers have ties

    packed = hidden_states(model, ids, doc)
    alone = hidden_states(model, ids[:, 24:], torch.zeros(1, 16, dtype=torch.int64))

    assert torch.allclose(packed[:, 24:], alone, atol=1e-5)


def test_every_parameter_gets_a_gradient() -> None:
    model = random_model()
    ids = torch.randint(0, TINY.vocab, (1, 48))
    run = Run(
        Functions(), make_packing(torch.zeros_like(ids)), noise=0.5, index_rows=1, index_losses=[], loads=[]
    )

    hidden = model.trunk(ids, run)
    mtp = model.mtp_hidden(ids, hidden, run)
    loss = model.logits(hidden, run).logsumexp(1).mean() + model.logits(mtp, run).logsumexp(1).mean()
    assert run.index_losses is not None
    (loss + sum(run.index_losses)).backward()

    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
