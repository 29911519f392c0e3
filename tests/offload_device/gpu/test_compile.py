"""The kernels compile ahead of time, down to machine code, for every kind of card they are meant for."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime.jit import KernelInterface

from glm53srv.offload.device import gpu
from tests.offload_device.gpu.compile_kernels import KERNELS

ROOT = Path(__file__).parents[3]
ARCHITECTURES = (86, 89, 90, 120)


def test_every_kernel_of_ours_is_among_the_compiled() -> None:
    found = set()
    for module in pkgutil.iter_modules(gpu.__path__):
        names = vars(importlib.import_module(f"{gpu.__name__}.{module.name}"))
        found |= {kernel.fn.__name__ for kernel in names.values() if isinstance(kernel, KernelInterface)}
    assert found == {kernel.fn.__name__ for kernel, _, _ in KERNELS.values()}
    assert {"plan_layer", "gather_experts"} <= found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_for(architecture: int, tmp_path: Path) -> None:
    # Another process: under the interpreter a kernel is a Python function and cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.offload_device.gpu.compile_kernels", str(architecture)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert set(compiled) == set(KERNELS)
    for name, facts in compiled.items():
        assert facts["cubin_bytes"] > 0, name
        assert facts["target"] == f"sm_{architecture}", name
    # The last word of a job is written so that the CPU sees all the others before it.
    fences = re.compile(r"atom\.global\.(?:sys\.acq_rel|acq_rel\.sys)\.add\.u32")
    for ending in ("", ", ahead"):
        plan = compiled[f"plan_layer fast{ending}"]["ptx"]
        (fence,) = fences.finditer(plan)
        assert len(re.findall(r"st\.global", plan[fence.end() :])) == 1
        assert not fences.search(compiled[f"plan_layer exact{ending}"]["ptx"])
        # The input travels in pieces that the link likes.
        assert re.search(r"st\.global\.v4\.b32", plan[: fence.start()])
    # Copies go by 16 bytes, also where blocks are left out.
    for name in ("gather_experts whole", "gather_experts in part"):
        assert re.search(r"ld\.global\.v2\.b64", compiled[name]["ptx"]), name
        assert re.search(r"st\.global\.v2\.b64", compiled[name]["ptx"]), name
        # And a warp's threads read neighbours: they exchange nothing before they store.
        assert compiled[name]["shared_bytes"] == 0, name
    # An order's number goes behind a fence of the system's, as a job's does; arrivals are read anew.
    order = compiled["post_order"]["ptx"]
    (fence,) = fences.finditer(order)
    assert len(re.findall(r"st\.global", order[fence.end() :])) == 1
    assert compiled["await_order"]["ptx"].count("ld.volatile.global") >= 2
    # The answer is read anew each time, its sums behind it.
    assert compiled["add_partial"]["ptx"].count("ld.volatile.global.v4") == 1
