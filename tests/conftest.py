"""Fixtures shared by the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Give the folder of facts, oracles and fixtures beside the checkout; a test is skipped without it."""
    if not (SHARED / "README.md").is_file():
        pytest.skip(f"needs the shared fixtures at {SHARED}, which a user's checkout does not have")
    return SHARED
