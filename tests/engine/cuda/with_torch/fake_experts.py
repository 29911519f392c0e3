"""The package's sparse layer with its compiled path, as far as launches go: its arguments by place, sums by a
formula, and what a GPU's kernel would need of its scratch checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

HIDDEN, NEURONS, MAX_ROWS, TOP_K, EXPERTS = 256, 128, 4, 3, 6
SHARED_NEURONS = 384
NUM_SLOTS = MAX_ROWS * TOP_K


class FakeLinear:
    """A matrix of one expert."""

    def __init__(self, seed: int, rows: int, columns: int, bits: int) -> None:
        self.K, self.mcg, self.mul1, self.bias = bits, False, True, None
        generator = torch.Generator().manual_seed(seed)
        self.trellis = torch.randint(0, 99, (rows // 16, columns // 16, 16 * bits), generator=generator)
        self.suh, self.svh = torch.ones(rows).half(), torch.ones(columns).half()


class FakeModule:
    """A matrix as the package's networks hold it."""

    def __init__(self, inner: FakeLinear, rows: int, columns: int) -> None:
        self.inner, self.in_features, self.out_features = inner, rows, columns


class FakeShared:
    """A shared expert."""

    def __init__(self, seed: int) -> None:
        self.activation_fn, self.act_limit = "silu", 7.0
        shapes = ((HIDDEN, SHARED_NEURONS), (HIDDEN, SHARED_NEURONS), (SHARED_NEURONS, HIDDEN))
        made = [
            FakeModule(FakeLinear(seed + number, *shape, bits=5), *shape)
            for number, shape in enumerate(shapes)
        ]
        self.gates, self.ups, self.downs = ([each] for each in made)


@dataclass
class FakeTables:
    """A matrix of all experts: addresses."""

    name: str
    K: int = 3
    mcg: bool = False
    mul1: bool = True

    def __post_init__(self) -> None:
        for kind in ("ptrs_trellis", "ptrs_suh", "ptrs_svh"):
            setattr(self, kind, torch.arange(EXPERTS))


@dataclass
class FakeConfig:
    """The package's record of buffers."""

    min_expert: int = -1
    max_expert: int = -1
    yh: torch.Tensor = field(default_factory=lambda: torch.zeros((NUM_SLOTS, 1, HIDDEN)).half())
    interm_g: torch.Tensor = field(default_factory=lambda: torch.zeros((NUM_SLOTS, 1, NEURONS)).half())
    interm_u: torch.Tensor = field(default_factory=lambda: torch.zeros((NUM_SLOTS, 1, NEURONS)).half())
    interm_a: torch.Tensor = field(default_factory=lambda: torch.zeros((NUM_SLOTS, 1, NEURONS)).half())
    out_d: torch.Tensor = field(default_factory=lambda: torch.zeros((NUM_SLOTS, 1, HIDDEN)))
    out_bszn: torch.Tensor = field(default_factory=lambda: torch.full((MAX_ROWS, HIDDEN), torch.nan))


class FakeLayer:
    """What a loaded layer has."""

    def __init__(self, seed: int) -> None:
        self.support_quant_paths = self.gated = self.bc_sh_exp = self.is_plain = True
        self.activation_fn, self.act_limit, self.shared_gate = "silu", 10.0, None
        self.experts_cfg = FakeConfig()
        self.multi_gate, self.multi_up, self.multi_down = map(FakeTables, ("gate", "up", "down"))
        self.shared_experts = FakeShared(seed)

    def shared_coop_ok(self) -> bool:
        return self.is_plain

    def whole(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Give a layer's sums."""
        return routed_sums(x, picks, weights) + shared_sums(x)


def routed_sums(x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Give a formula of what routed experts compute."""
    return x.float() * (weights.float() * (1 + picks)).sum(1, keepdim=True)


def shared_sums(x: torch.Tensor) -> torch.Tensor:
    """Give a formula of what the shared expert computes."""
    return 100 + x.float()


class FakeCompiled:
    """The package's compiled path of a layer, the shared expert inside."""

    def __init__(self, layer: FakeLayer) -> None:
        self.layer, self.num_runs = layer, 0

    def run_bszN(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        self.num_runs += 1
        self.layer.experts_cfg.out_bszn[: len(x)] = self.layer.whole(x, picks, weights)


class FakeExtension:
    """The package's compiled part. Refuses what its launcher would refuse. slots: a launch's scratch."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def exl3_moe_coop(self, x: Any, picks: Any, weights: Any, first: int, last: int, *rest: Any) -> None:
        hidden, *tables = rest[:10]
        biases, (gate_bits, up_bits, down_bits), codebook = rest[10:13], rest[13:16], rest[16:18]
        activation, limit, gated = rest[18:21]
        gate_in, up_in, gate_sums, up_sums, active, down_sums, counters, out = rest[21:29]
        shared, gate = rest[29:]
        assert (first, last, biases, gate) == (-1, -1, (None, None, None), None)
        assert (codebook, activation, gated) == ((False, True), 0, True)
        assert picks.dtype == torch.int64
        assert weights.dtype == x.dtype == torch.float16
        is_shared = gate_bits == 5
        self.slots.append(min(each.numel() // each.shape[-1] for each in rest[21:27]))
        neurons = SHARED_NEURONS if is_shared else NEURONS
        assert (gate_bits, up_bits, down_bits) == ((5,) * 3 if is_shared else (3,) * 3)
        assert limit == (7.0 if is_shared else 10.0)
        assert all(table.dtype == torch.int64 and table.is_contiguous() for table in tables)
        assert {len(table) for table in tables} == {1 if is_shared else EXPERTS}
        widths = (hidden, hidden, neurons, neurons, neurons, hidden)
        scratch = (gate_in, up_in, gate_sums, up_sums, active, down_sums)
        assert tuple(each.shape[-1] for each in scratch) == widths
        slots = min(each.numel() // width for each, width in zip(scratch, widths, strict=True))
        assert picks.numel() <= slots
        assert down_sums.dtype == out.dtype == torch.float32
        assert counters.dtype == torch.int32
        needed = slots * (neurons // 128) + len(out) * (hidden // 128) + 2 + (slots + 1) + slots
        assert len(counters) >= needed
        assert not counters.any()
        if is_shared:
            assert shared is None
            assert picks.eq(0).all()
            assert weights.eq(1).all()
            out[: len(x)] = shared_sums(x)
        else:
            out[: len(x)] = routed_sums(x, picks, weights)
            if shared is not None:
                assert shared.is_contiguous()
                assert shared.shape == x.shape
                out[: len(x)] += shared
