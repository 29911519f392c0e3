"""Keeps our cache of experts to a number of slots while decode is timed.

A shortened model leaves more of the card to the cache than the whole one would, and a cache made as small as
the share of its layers would have no room for what a prompt borrows. So the cache is as large as the whole
model's, and the slots beyond the share are withheld from decode, as they are while a prompt has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from glm53srv.offload.residency import ResidencyPolicy


@contextlib.contextmanager
def holding_slots(policy: ResidencyPolicy, num_slots: int) -> Iterator[None]:
    """Let decode use num_slots of the cache, or all it has if they are fewer. No prompt may run inside."""
    withheld = max(0, policy.capacity - num_slots)
    policy.shrink(withheld)
    try:
        yield
    finally:
        policy.grow(withheld)
