"""Keeping the arena where it is: locked for the CPU alone; gpu/registered.py registers it with the driver."""

from __future__ import annotations

import resource
from typing import Protocol

from glm53srv.errors import MachineError
from glm53srv.offload.device.region import GIB, Region


class Pinning(Protocol):
    """Fixes a region in memory. Called once after it is filled, and released before it is unmapped."""

    name: str

    def pin(self, region: Region) -> None:
        """Pin it. Raises MachineError that says which limit to raise."""

    def release(self) -> None:
        """Undo pin(); nothing happens if it was never called. Idempotent."""


class NoPinning:
    """Leaves the pages to the kernel: the CPU engine's default."""

    name = "not pinned"

    def pin(self, region: Region) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class LockedMemory:
    """mlock: the pages are never swapped out. Unmapping the region unlocks it."""

    name = "locked"

    def pin(self, region: Region) -> None:
        try:
            region.lock()
        except OSError as error:
            raise MachineError(
                f"cannot lock {region.num_bytes / GIB:.2f} GiB ({error.strerror}); the limit is "
                f"{memlock_text()}: raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd "
                "unit, or --ulimit memlock=-1 of a container"
            ) from error

    def release(self) -> None:
        """Do nothing: munmap unlocks."""


def memlock_text() -> str:
    """Say how much memory this process may lock."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
