"""These tests need triton and torch, which `make test` does not install: `make test-triton` runs them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
