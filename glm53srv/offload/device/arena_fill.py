"""Reads expert records from the checkpoint into place: several readers, no buffer in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import CheckpointError
from glm53srv.progress import Progress

LOT_BYTES = 64 * 2**20
"""What a reader takes at a time: enough to read ahead in one file, little enough to share the work evenly."""


@dataclass(frozen=True, slots=True)
class Extent:
    """num_bytes at `offset` of a file, and their place in the arena."""

    path: Path
    offset: int
    num_bytes: int
    target: int


@dataclass(frozen=True, slots=True)
class FillReport:
    """How fast the arena was filled."""

    num_bytes: int
    elapsed_s: float
    num_readers: int

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) per second."""
        return self.num_bytes / self.elapsed_s / 1e9 if self.elapsed_s > 0 else 0.0


def fill(
    memory: NDArray[np.uint8],
    extents: Sequence[Extent],
    num_readers: int,
    *,
    drops_cache: bool,
    progress: Progress,
    clock: Callable[[], float] = time.perf_counter,
) -> FillReport:
    """Read extents into memory, uint8 (bytes,).

    drops_cache: tell the kernel to forget each file's pages once they are read: without it the page cache
    holds a second copy of the experts. progress: called from this thread. Raises CheckpointError for a file
    that cannot be read or ends early.
    """
    begin_s = clock()
    lots = cut_lots(sorted(extents, key=lambda extent: (str(extent.path), extent.offset)))
    total = sum(extent.num_bytes for extent in extents)
    done = 0
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in {extent.path for extent in extents}}
        readers = stack.enter_context(ThreadPoolExecutor(num_readers, "arena-reader"))
        waiting = [readers.submit(_read_lot, memory, lot, files, drops_cache) for lot in lots]
        try:
            for future in as_completed(waiting):
                done += future.result()
                elapsed_s = max(clock() - begin_s, 1e-9)
                progress(done / total, f"experts {done / 1e9:.1f} GB, {done / elapsed_s / 1e9:.2f} GB/s")
        finally:
            for future in waiting:
                future.cancel()
    return FillReport(total, clock() - begin_s, num_readers)


def cut_lots(extents: Sequence[Extent], lot_bytes: int = LOT_BYTES) -> list[list[Extent]]:
    """Cut sorted extents into runs of one file and about lot_bytes."""
    lots: list[list[Extent]] = []
    room = 0
    for extent in extents:
        if not lots or lots[-1][-1].path != extent.path or room <= 0:
            lots.append([])
            room = lot_bytes
        lots[-1].append(extent)
        room -= extent.num_bytes
    return lots


def read_extent(descriptor: int, extent: Extent, target: NDArray[np.uint8]) -> None:
    """Read an extent into target, uint8 (num_bytes,). Raises CheckpointError."""
    view = target.data
    position = 0
    while position < extent.num_bytes:
        try:
            count = os.preadv(descriptor, [view[position:]], extent.offset + position)
        except OSError as error:
            raise CheckpointError(f"{extent.path}: cannot be read ({error.strerror})") from error
        if count == 0:
            raise CheckpointError(
                f"{extent.path}: ended at byte {extent.offset + position} while it was read; fetch it again"
            )
        position += count


def _open(path: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _read_lot(
    memory: NDArray[np.uint8], lot: Sequence[Extent], files: dict[Path, int], drops_cache: bool
) -> int:
    for extent in lot:
        descriptor = files[extent.path]
        read_extent(descriptor, extent, memory[extent.target : extent.target + extent.num_bytes])
        if drops_cache:
            os.posix_fadvise(descriptor, extent.offset, extent.num_bytes, os.POSIX_FADV_DONTNEED)
    return sum(extent.num_bytes for extent in lot)
