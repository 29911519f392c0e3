"""A sparse layer's experts as launches of their own: the package's decode kernel, with the arguments and the
order of sums of its compiled path, which does them one behind the other.

    shared      the shared expert, beside the copies on which the routed ones wait
    first       those of the routed experts that wait for nothing
    last        the others, and the shared one's sum added where the package adds it

So `shared` and then one `last` over all picks give the bits of the package's own call. Neither is a
cooperative kernel, as the package's product for a shared expert in a network of its own is: such a one waits
until no copy is left on the card, and what is enqueued behind it waits, too (H200, traced, 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SILU = 0
"""The package's number of an activation."""
SUMMED = 128
"""Neurons whose arrival the kernel counts together."""
FIRST_PIECES = 2
"""In how many pieces the sums of `first` are taken in a step of one row; half as many in one of two. The
package takes as many as its variable allows (EXL3_MOE_COOP_KSPLIT) and as there is scratch for: four in its
own. Four experts of one row took 60 us in two pieces and 70 in four, six 93 and 99; of two rows each 104 in
one and 123 in four. One or two of one row, as `last` has, took 44 and 59 in two, 37 and 38 in four, 32 and 49
in eight (bench.cuda.pieces, H200, 2026-11-30)."""


class Scratch:
    """Buffers of kernels that layers share, since none of one kind runs beside another; zeroed when made."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Give a buffer, the same for the same arguments."""
        key = (name, shape, dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=device)
        return self._buffers[key]


class ExpertLaunches:
    """The launches of a loaded layer for which can_launch holds. extension: the package's compiled part."""

    def __init__(self, layer: Any, maker: LaunchMaker) -> None:
        extension, scratch = maker.extension, maker.scratch
        self._maker = maker
        self._run = extension.exl3_moe_coop
        self._range = (layer.experts_cfg.min_expert, layer.experts_cfg.max_expert)
        self._sums = layer.experts_cfg.out_bszn
        self._routed = _routed_arguments(layer, scratch)
        self._first = _routed_arguments(layer, scratch, FIRST_PIECES)
        self._shared = _shared_arguments(layer, scratch)
        rows, device = len(self._sums), self._sums.device
        self._shared_sums = scratch.get("shared sums", tuple(self._sums.shape), torch.float32, device)
        self._shared_picks = scratch.get("shared picks", (rows, 1), torch.int64, device)
        self._shared_weights = scratch.get("shared weights", (rows, 1), torch.float16, device)
        self._shared_weights.fill_(1.0)

    def shared(self, x: torch.Tensor) -> None:
        """Enqueue the shared expert for x, float16 (rows, hidden); `last` adds it."""
        picks, weights = self._shared_picks[: len(x)], self._shared_weights[: len(x)]
        self._run(x, picks, weights, -1, -1, *self._shared, self._shared_sums, None, None)

    def first(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Enqueue routed experts: picks int64, weights float16 (rows, top_k), of which 0 leaves a pick out.

        Gives their sums, float32 (rows, hidden), which the next call overwrites.
        """
        is_small = len(x) <= FIRST_PIECES and self._maker.cuts_first_less
        arguments = self._first if is_small else self._routed
        self._run(x, picks, weights, *self._range, *arguments, self._sums, None, None)
        return self._sums[: len(x)]

    def last(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> None:
        """Enqueue likewise the others; the sums go where the package leaves them."""
        shared = self._shared_sums[: len(x)]
        self._run(x, picks, weights, *self._range, *self._routed, self._sums, shared, None)


class LaunchMaker:
    """Makes the launches of a model's layers, with the scratch that they share.

    cuts_first_less: see FIRST_PIECES; counts from the next launch on.
    """

    def __init__(self, extension: Any) -> None:
        """extension: the package's compiled part."""
        self.extension, self.scratch = extension, Scratch()
        self.cuts_first_less = True

    def make(self, layer: Any) -> ExpertLaunches | None:
        """Give a loaded layer's launches, None if it cannot be launched so."""
        return ExpertLaunches(layer, self) if can_launch(layer) else None


def _routed_arguments(layer: Any, scratch: Scratch, pieces: int = 0) -> tuple[Any, ...]:
    """Give what a launch of routed experts takes between its picks and its sums.

    pieces: for one row, with scratch for its sums in so many; 0 for the package's own scratch.
    """
    config, device = layer.experts_cfg, layer.experts_cfg.yh.device
    num_slots, _, hidden = config.yh.shape
    rows, neurons, out = len(config.out_bszn), config.interm_u.shape[-1], config.out_d.shape[-1]
    matrices = (layer.multi_gate, layer.multi_up, layer.multi_down)
    tables = [table for each in matrices for table in (each.ptrs_trellis, each.ptrs_suh, each.ptrs_svh)]
    own = (config.yh, None, config.interm_g, config.interm_u, config.interm_a, config.out_d)
    if pieces:
        num_slots = num_slots // rows * pieces
    sums = config.interm_g.dtype
    shapes = {
        "routed gate": ((num_slots, hidden), torch.float16),
        "routed up": ((num_slots, hidden), torch.float16),
        "routed gate sums": ((num_slots, neurons), sums),
        "routed up sums": ((num_slots, neurons), sums),
        "routed active": ((num_slots, neurons), torch.float16),
        "routed down sums": ((num_slots, out), torch.float32),
        "routed counters": ((num_counters(num_slots, rows, neurons, out),), torch.int32),
    }
    buffers = [
        scratch.get(name, shape, dtype, device) if pieces or package is None else package
        for (name, (shape, dtype)), package in zip(shapes.items(), (*own, None), strict=True)
    ]
    return (hidden, *tables, *_kinds(matrices, layer.act_limit), *buffers)


def _shared_arguments(layer: Any, scratch: Scratch) -> tuple[Any, ...]:
    """Give likewise those of the shared expert: expert 0 of tables of one."""
    config, shared = layer.experts_cfg, layer.shared_experts
    device, sums = config.yh.device, config.interm_g.dtype
    matrices = [each[0].inner for each in (shared.gates, shared.ups, shared.downs)]
    tables = [
        torch.tensor([part.data_ptr()], dtype=torch.int64, device=device)
        for each in matrices
        for part in (each.trellis, each.suh, each.svh)
    ]
    rows, hidden = len(config.out_bszn), shared.gates[0].in_features
    neurons, out = shared.gates[0].out_features, shared.downs[0].out_features
    shapes = {
        "shared gate": ((rows, hidden), torch.float16),
        "shared up": ((rows, hidden), torch.float16),
        "shared gate sums": ((rows, neurons), sums),
        "shared up sums": ((rows, neurons), sums),
        "shared active": ((rows, neurons), torch.float16),
        "shared down sums": ((rows, out), torch.float32),
        "shared counters": ((num_counters(rows, rows, neurons, out),), torch.int32),
    }
    buffers = [scratch.get(name, shape, dtype, device) for name, (shape, dtype) in shapes.items()]
    return (hidden, *tables, *_kinds(matrices, shared.act_limit), *buffers)


def _kinds(matrices: Sequence[Any], limit: float) -> tuple[Any, ...]:
    """Give biases (none), bits a weight, codebook, activation and its limit, and that gates there are."""
    gate, up, down = matrices
    return (None, None, None, gate.K, up.K, down.K, bool(up.mcg), bool(up.mul1), SILU, limit, True)


def num_counters(num_slots: int, rows: int, neurons: int, out: int) -> int:
    """Give the counters that a launch needs for so many picks and rows (exl3_moe_coop_ctr_len there)."""
    return num_slots * (neurons // SUMMED) + rows * (out // SUMMED) + 2 * num_slots + 3


def can_launch(layer: Any) -> bool:
    """Tell whether a loaded layer's experts can be launched so; the published model's can."""
    if not (layer.support_quant_paths and layer.gated and layer.activation_fn == "silu"):
        return False
    shared = layer.shared_experts
    if not (layer.bc_sh_exp and layer.shared_coop_ok() and layer.shared_gate is None):
        return False
    gate, up, down = (each[0].inner for each in (shared.gates, shared.ups, shared.downs))
    kinds = {(each.mcg, each.mul1) for each in (gate, up, down)}
    return (
        shared.activation_fn == "silu"
        and gate.K == up.K
        and len(kinds) == 1
        and all(each.bias is None for each in (gate, up, down))
        and shared.downs[0].out_features == layer.experts_cfg.out_bszn.shape[-1]
        and shared.gates[0].in_features == layer.experts_cfg.yh.shape[-1]
    )
