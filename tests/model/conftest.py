"""Decoders over the random model and over the small model with golden outputs, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53srv.kernels import KernelPool
from glm53srv.model.decoder import Decoder
from glm53srv.model.linear import KernelContext
from glm53srv.model.loading import load_decoder
from tests.model.goldens import Goldens


@pytest.fixture(scope="session")
def context() -> Iterator[KernelContext]:
    """Give the best instruction set on one thread: the bits are those of any number."""
    with KernelPool(1) as pool:
        yield KernelContext(pool)


@pytest.fixture(scope="session")
def random_decoder(random_model_dir: Path, context: KernelContext) -> Decoder:
    """Give the decoder of the packed random model."""
    return load_decoder(random_model_dir, context)


@pytest.fixture(scope="session")
def goldens(shared_dir: Path) -> Goldens:
    """Give the reference outputs of the small model."""
    return Goldens(shared_dir / "fixtures" / "tiny-random")


@pytest.fixture(scope="session")
def golden_decoder(goldens: Goldens, context: KernelContext) -> Decoder:
    """Give the decoder of the small model."""
    return load_decoder(goldens.checkpoint_dir, context)
