"""One seam between the checks and the machine they run on, so that a test can pretend another one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from glm53srv.gpu_facts import GpuReport, read_gpus
from glm53srv.machine import MachineFacts, read_machine
from glm53srv.native_library import CpuFeatures, open_library
from glm53srv.packages import package_version

BLOCK_BYTES = 8 * 2**20
MOST_BYTES = 512 * 2**20
MOST_S = 1.0
"""Reading ends after this much or this long, whichever is first."""

Clock = Callable[[], float]


class Probe(Protocol):
    """What the checks ask about a machine. Everything but read_rate answers within milliseconds."""

    def facts(self) -> MachineFacts:
        """Processor, memory and limits."""

    def gpus(self) -> GpuReport:
        """The GPUs; may take a second where the driver sleeps."""

    def features(self) -> CpuFeatures:
        """What CPU and native build offer. Raises MachineError if the kernels are not built."""

    def version(self, package: str) -> str | None:
        """Version of an installed package, None without it. Imports nothing."""

    def read_rate(self, path: Path) -> float | None:
        """Bytes per second at which a file comes from its disk; None if that cannot be told."""


class LocalProbe:
    """This machine."""

    def facts(self) -> MachineFacts:
        return read_machine()

    def gpus(self) -> GpuReport:
        return read_gpus()

    def features(self) -> CpuFeatures:
        return open_library().features()

    def version(self, package: str) -> str | None:
        return package_version(package)

    def read_rate(self, path: Path) -> float | None:
        return measure_read_rate(path)


def measure_read_rate(path: Path, clock: Clock = time.monotonic) -> float | None:
    """Read the start of a file, at most a second of it, and give bytes per second.

    The kernel is asked to forget the range first, so that the disk is read and not the page cache; pages that
    a process has mapped stay. None for a file that cannot be read or holds less than one block of 8 MiB.
    """
    try:
        with path.open("rb", buffering=0) as file:
            length = min(os.fstat(file.fileno()).st_size, MOST_BYTES)
            if length < BLOCK_BYTES:
                return None
            os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_DONTNEED)
            buffer = bytearray(BLOCK_BYTES)
            done, begin = 0, clock()
            while done + BLOCK_BYTES <= length and (count := file.readinto(buffer)):
                done += count
                if clock() - begin >= MOST_S:
                    break
            seconds = clock() - begin
    except OSError:
        return None
    return done / seconds if seconds > 0 and done else None
