"""Which launch configuration is kept, and that no autotuner is missed behind other decorators."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from reference.demo.pinned import choose, pin_kernels


@dataclass
class Config:
    num_warps: int
    num_stages: int
    kwargs: dict[str, Any] = field(default_factory=dict)


TILES = [
    Config(warps, stages, {"BK": k, "BV": v})
    for k in (32, 64)
    for v in (64, 128)
    for warps in (2, 4, 8)
    for stages in (4, 3, 2)
]


def test_the_middle_of_a_list_is_kept() -> None:
    assert choose(TILES, "chunk_gla_fwd_kernel_o") == Config(4, 2, {"BK": 64, "BV": 64})


def test_kernels_on_small_blocks_get_fewer_warps() -> None:
    configs = [Config(warps, 3) for warps in (1, 2, 4, 8)]

    assert choose(configs, "chunk_kda_bwd_kernel_intra").num_warps == 2
    assert choose(configs, "l2norm_fwd_kernel").num_warps == 4


def test_the_nearest_is_kept_where_the_wanted_one_is_missing() -> None:
    assert choose([Config(1, 1), Config(16, 5)], "any") == Config(1, 1)


def test_every_autotuner_of_the_package_keeps_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    configs = [triton.Config({"BK": size}, num_warps=4) for size in (32, 64, 128)]

    def kernel(x: Any, BK: Any) -> None:
        """Never launched."""

    plain = triton.autotune(configs, key=["x"])(triton.jit(kernel))
    wrapped = triton.heuristics({"BK": lambda args: 1})(
        triton.autotune(configs, key=["x"])(triton.jit(kernel))
    )
    other = triton.autotune(configs, key=["x"])(triton.jit(kernel))
    for name, content in (
        ("some.ops", {"plain": plain, "wrapped": wrapped}),
        ("something", {"other": other}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    chosen = pin_kernels("some")

    assert sorted(chosen) == ["plain", "wrapped"]
    assert [config.kwargs for config in plain.configs] == [{"BK": 64}]
    assert [config.kwargs for config in wrapped.fn.configs] == [{"BK": 64}]
    assert len(other.configs) == 3
