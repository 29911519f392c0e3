"""The policy is pure: no torch, no GPU package, no clock, no environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import glm53srv.offload

POLICY = sorted(
    path
    for folder in (".", "simulate")
    for path in (Path(glm53srv.offload.__file__).parent / folder).glob("*.py")
)
FORBIDDEN = {"torch", "triton", "exllamav3", "cffi", "time", "random", "threading", "asyncio", "subprocess"}


@pytest.mark.parametrize("path", POLICY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_policy_imports_nothing_that_acts(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
            assert not node.module.startswith("glm53srv.offload.device")
    assert not names & FORBIDDEN
    assert "environ" not in path.read_text()
