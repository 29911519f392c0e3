"""A KDA layer's kernels on two streams: the sums of the layer, who waits for whom, and when it stands in.

Kernels and streams are fakes: each kernel computes what the package's does, and notes what was certain to be
done before it began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm53srv.engine.cuda.gates_beside import GatesBeside, TwoStreams, can_stand_in

HIDDEN, HEADS, KEY, VALUE, TAPS, SLOTS = 32, 3, 4, 6, 4, 5
COLUMNS = HEADS * (2 * KEY + VALUE)
BOUND, SCALE = -5.0, 2.0


@dataclass
class FakeStream:
    """Knows what has happened before whatever comes next on it."""

    seen: set[str] = field(default_factory=set)

    def record_event(self) -> frozenset[str]:
        return frozenset(self.seen)

    def wait_event(self, event: frozenset[str]) -> None:
        self.seen |= event


class FakeStreams:
    """Two of them, of which one is current."""

    def __init__(self) -> None:
        self.main, self.side = FakeStream(), FakeStream()
        self.current = self.main
        self.before: dict[str, frozenset[str]] = {}

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.current, usual = stream, self.current
        yield
        self.current = usual

    def given(self) -> TwoStreams:
        return TwoStreams(self.side, lambda: self.main, self.on)

    def run(self, work: str) -> None:
        self.before[work] = frozenset(self.current.seen)
        self.current.seen.add(work)


class FakeExtension:
    """The package's kernels by their formulas, (rows, 1, ...) each."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self._names: dict[int, str] = {}

    def name(self, weights: torch.Tensor, work: str) -> torch.Tensor:
        """Call what reads these weights so."""
        self._names[id(weights)] = work
        return weights

    def gdn_ba_gemv(self, x: torch.Tensor, weights: torch.Tensor, bias: None, y: torch.Tensor) -> None:
        assert bias is None
        self._streams.run(self._names[id(weights)])
        y.copy_(x.float() @ weights.float().T)

    def gdn_lowrank_gemv_f(self, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> None:
        self._streams.run(self._names[id(weights)])
        y.copy_(x @ weights.float().T)

    def exl3_gemm(self, x: torch.Tensor, trellis: torch.Tensor, y: torch.Tensor, *rest: Any) -> None:
        suh, rotated, svh, shape, mcg, mul1, multiprocessors = rest
        assert (shape, mcg, mul1, multiprocessors) == (-1, False, True, 0)
        assert rotated.shape == x.shape
        assert rotated.dtype == torch.float16
        self._streams.run(self._names[id(trellis)])
        y.copy_(((x.float() * suh) @ trellis) * svh)

    def kda_gate_op(
        self,
        qkv: torch.Tensor,
        b: torch.Tensor,
        f: torch.Tensor,
        dt_bias: torch.Tensor,
        a_log: torch.Tensor,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        g: torch.Tensor,
        bound: float,
        scale: float,
    ) -> None:
        self._streams.run("gate op")
        mixed.copy_(qkv.transpose(1, 2))
        beta.copy_(torch.sigmoid(b * scale))
        shifted = (f + dt_bias.float()).view(*f.shape[:2], HEADS, KEY)
        g.copy_(bound * torch.sigmoid(torch.exp(a_log).view(1, 1, HEADS, 1) * shifted))

    def cuda_causal_conv1d_update(
        self,
        x: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor,
        out: torch.Tensor,
        activates: bool,
        history: bool,
    ) -> None:
        assert (activates, history) == (True, False)
        self._streams.run("convolution")
        for row, slot in enumerate(slots.tolist()):
            state[slot] = torch.cat([state[slot][:, 1:], x[row]], dim=1)
            out[row, 0] = torch.nn.functional.silu(
                (state[slot].float() * weights.float()).sum(1) + bias.float()
            )

    def cuda_recurrent_gated_delta_rule(
        self,
        qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        out: torch.Tensor,
        *rest: Any,
    ) -> None:
        *heads, slots, history = rest
        assert heads == [HEADS, HEADS, KEY, VALUE]
        assert not history
        self._streams.run("delta rule")
        q, k, v = qkv.float().split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], dim=-1)
        for row, slot in enumerate(slots.tolist()):
            for head in range(HEADS):
                keys, values = slice(head * KEY, (head + 1) * KEY), slice(head * VALUE, (head + 1) * VALUE)
                own, key, value = state[slot, head], k[row, 0, keys], v[row, 0, values]
                own *= torch.exp(g[row, 0, head])[:, None]
                own += beta[row, 0, head].float() * torch.outer(key, value - key @ own)
                out[row, 0, head] = q[row, 0, keys] @ own


class Norm:
    """The package's gated norm."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams, self.bc = streams, self

    def run(self, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
        self._streams.run("norm")
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        y.copy_((x.float() * scale * torch.sigmoid(gate)).flatten(2))


def make_layer(streams: FakeStreams, extension: FakeExtension) -> Any:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def linear(name: str, rows: int, columns: int) -> Any:
        trellis = extension.name(draw(columns, rows).T.contiguous(), name)
        scales = 1 + draw(rows).abs(), 1 + draw(columns).abs()
        inner = SimpleNamespace(
            trellis=trellis, suh=scales[0], svh=scales[1], mcg=False, mul1=True, bias=None
        )
        return SimpleNamespace(inner=inner)

    return SimpleNamespace(
        bc_split=True,
        kda=True,
        ba_weight_filled=True,
        bc="compiled",
        device="cpu",
        hidden_size=HIDDEN,
        fdim_qkv=COLUMNS,
        num_k_heads=HEADS,
        num_v_heads=HEADS,
        k_head_dim=KEY,
        v_head_dim=VALUE,
        gate_lower_bound=BOUND,
        beta_scale=SCALE,
        qkv_proj=linear("projection", HIDDEN, COLUMNS),
        o_proj=linear("output", HEADS * VALUE, HIDDEN),
        kda_b_t=extension.name(draw(HEADS, HIDDEN).half(), "beta"),
        kda_fa_t=extension.name(draw(KEY, HIDDEN).half(), "forget 1"),
        kda_fb_t=extension.name(draw(HEADS * KEY, KEY).half(), "forget 2"),
        kda_ga_t=extension.name(draw(VALUE, HIDDEN).half(), "gate 1"),
        kda_gb_t=extension.name(draw(HEADS * VALUE, VALUE).half(), "gate 2"),
        dt_bias_bc=draw(HEADS * KEY).bfloat16(),
        a_log=draw(HEADS),
        conv1d_weight_flat=draw(COLUMNS, TAPS).bfloat16(),
        conv1d_bias=draw(COLUMNS).bfloat16(),
        norm=Norm(streams),
    )


def expected_rows(
    layer: Any, x: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
) -> Any:
    """Compute the layer by its definition: KDA as the package's Python path has it; the states change."""
    inner, out = layer.qkv_proj.inner, layer.o_proj.inner
    qkv = ((x[:, 0].float() * inner.suh) @ inner.trellis) * inner.svh
    beta = torch.sigmoid(x[:, 0].float() @ layer.kda_b_t.float().T * SCALE).bfloat16().float()
    forget = x[:, 0].float() @ layer.kda_fa_t.float().T @ layer.kda_fb_t.float().T
    gate = x[:, 0].float() @ layer.kda_ga_t.float().T @ layer.kda_gb_t.float().T
    decay = torch.exp(layer.a_log).view(HEADS, 1) * (forget + layer.dt_bias_bc.float()).view(-1, HEADS, KEY)
    decay = torch.exp(BOUND * torch.sigmoid(decay))
    rows = []
    for row, slot in enumerate(slots.tolist()):
        conv[slot] = torch.cat([conv[slot][:, 1:], qkv[row].bfloat16()[:, None]], dim=1)
        mixed = (conv[slot].float() * layer.conv1d_weight_flat.float()).sum(1) + layer.conv1d_bias.float()
        q, k, v = (
            torch.nn.functional.silu(mixed)
            .bfloat16()
            .float()
            .split([HEADS * KEY, HEADS * KEY, HEADS * VALUE])
        )
        q, k, v = q.view(HEADS, KEY), k.view(HEADS, KEY), v.view(HEADS, VALUE)
        state[slot] *= decay[row][..., None]
        error = v - torch.einsum("hk,hkv->hv", k, state[slot])
        state[slot] += beta[row][:, None, None] * k[..., None] * error[:, None, :]
        summed = torch.einsum("hk,hkv->hv", q, state[slot]).bfloat16().float()
        normed = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5)
        normed = (normed * torch.sigmoid(gate[row].view(HEADS, VALUE))).flatten().half().float()
        rows.append(((normed * out.suh) @ out.trellis) * out.svh)
    return torch.stack(rows)[:, None]


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    conv = torch.randn((SLOTS, COLUMNS, TAPS), generator=generator).bfloat16()
    return conv, torch.randn((SLOTS, HEADS, KEY, VALUE), generator=generator).to(dtype) / 2


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_and_states_are_the_layers_over_several_steps(rows: int) -> None:
    streams = FakeStreams()
    extension = FakeExtension(streams)
    layer, gates = make_layer(streams, extension), GatesBeside(extension, streams.given())
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)[:rows]
    conv, state = states()
    expected_conv, expected_state = states()
    for step in range(3):
        x = torch.randn((rows, 1, HIDDEN), generator=torch.Generator().manual_seed(step)).half()
        y = torch.full((rows, 1, HIDDEN), torch.nan)
        with gates.standing_in([layer], rows):
            assert not layer.bc.needs_configure(rows, 1, False)
            layer.bc.run_bszN(x, y, conv, state, slots, False)
        expected = expected_rows(layer, x, expected_conv, expected_state, slots)
        torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(state, expected_state, rtol=1e-3, atol=1e-3)
        assert torch.equal(conv, expected_conv)


def test_gates_run_beside_the_projection_and_whoever_reads_them_waits() -> None:
    streams = FakeStreams()
    extension = FakeExtension(streams)
    layer, gates = make_layer(streams, extension), GatesBeside(extension, streams.given())
    conv, state = states()
    slots = torch.tensor([1], dtype=torch.int32)
    x, y = torch.zeros((1, 1, HIDDEN)).half(), torch.zeros((1, 1, HIDDEN))
    beside = {"beta", "forget 1", "forget 2", "gate 1", "gate 2"}
    with gates.standing_in([layer], 1):
        for step in range(2):
            streams.run(f"before {step}")
            layer.bc.run_bszN(x, y, conv, state, slots, False)
            assert {f"before {step}"} <= streams.before["beta"]  # x, and the readers of the step before
            if step == 0:
                assert not streams.before["projection"] & beside
                assert not any("projection" in streams.before[each] for each in beside)
                assert beside | {"projection"} <= streams.before["gate op"]
                assert beside <= streams.before["norm"]
                assert streams.main.seen >= streams.side.seen  # a graph may end behind the layer


def test_layers_stand_in_inside_only_and_share_buffers() -> None:
    streams = FakeStreams()
    extension = FakeExtension(streams)
    layers = [make_layer(streams, extension) for _ in range(2)]
    gates = GatesBeside(extension, streams.given())
    with contextlib.suppress(ZeroDivisionError), gates.standing_in(layers, 2):
        assert layers[0].bc._buffers is layers[1].bc._buffers
        assert all(layer.bc != "compiled" for layer in layers)
        1 / 0  # noqa: B018  # a capture that fails
    assert all(layer.bc == "compiled" for layer in layers)
    gates.is_on = False
    with gates.standing_in(layers, 2):
        assert all(layer.bc == "compiled" for layer in layers)


@pytest.mark.parametrize("name", ["bc_split", "kda", "ba_weight_filled", "bias"])
def test_a_layer_of_another_kind_runs_as_before(name: str) -> None:
    streams = FakeStreams()
    layer = make_layer(streams, FakeExtension(streams))
    assert can_stand_in(layer)
    if name == "bias":
        layer.o_proj.inner.bias = torch.zeros(HIDDEN)
    else:
        setattr(layer, name, False)
    assert not can_stand_in(layer)
    with GatesBeside(FakeExtension(streams), streams.given()).standing_in([layer], 1):
        assert layer.bc == "compiled"
