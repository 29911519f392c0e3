"""Muon for the matrices, Adam for the rest. Muon: Keller Jordan et al. 2024, momentum made orthogonal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic iteration of the Muon report; singular values end between 0.7 and 1.2."""


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Move every singular value of (n, out, in) matrices towards 1, by Newton-Schulz in bf16."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one size are handled together."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: nothing here needs one
        for group in self.param_groups:
            by_size: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_size[(param.shape[-2], param.shape[-1])].append(param)
            for (rows, columns), params in by_size.items():
                updates = [
                    self._momentum(param, group["momentum"]).reshape(-1, rows, columns) for param in params
                ]
                directions = orthogonalise(torch.cat(updates)).split([len(update) for update in updates])
                scale = max(1.0, rows / columns) ** 0.5
                for param, direction in zip(params, directions, strict=True):
                    param.mul_(1 - group["lr"] * group["decay"])
                    param.add_(direction.reshape(param.shape).to(param.dtype), alpha=-group["lr"] * scale)

    def _momentum(self, param: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[param]
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(param)
        assert param.grad is not None
        buffer: Tensor = state["buffer"]
        buffer.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(buffer, momentum)
