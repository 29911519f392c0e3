"""One pool per instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glm53srv.kernels import Isa, KernelPool, cpu_features


@pytest.fixture(scope="session", params=[isa for isa in Isa if isa is not Isa.AUTO], ids=lambda isa: isa.name)
def pool(request: pytest.FixtureRequest) -> Iterator[KernelPool]:
    """Give a pool of two threads, once per instruction set; those that this machine lacks are skipped."""
    isa: Isa = request.param
    if isa not in cpu_features().isas:
        pytest.skip(f"needs {isa.name}, which this CPU or build lacks")
    with KernelPool(2, isa) as made:
        yield made
