"""Large memory outside Python's heap, in the largest pages that can be had."""

from __future__ import annotations

import enum
import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53srv.errors import MachineError
from glm53srv.native_library import open_library

GIB = 2**30

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE_PAGES = re.compile(r"(?:AnonHugePages|Private_Hugetlb): +(\d+) kB")


class Pages(enum.IntEnum):
    """Kinds of pages, smallest first. TRANSPARENT is a wish: Region.huge_bytes tells what became of it."""

    PLAIN = 0
    TRANSPARENT = 1
    HUGE = 2


class Region:
    """Zeroed memory, unmapped when it and the last view of it are gone. Usable from any thread.

    pages: the kind that was granted. refusal: why a better kind was not, or "".
    """

    def __init__(self, num_bytes: int, pages: Pages = Pages.PLAIN) -> None:
        """Map num_bytes in pages of this kind or a smaller one. Raises MachineError without room for them."""
        library = open_library()
        ffi, lib = library.ffi, library.lib
        region = ffi.new("glm53_region *")
        status = lib.glm53_region_map(num_bytes, int(pages), region)
        refusal = _name(region.refusal)
        if status != lib.GLM53_OK:
            raise MachineError(
                f"cannot map {num_bytes / GIB:.2f} GiB ({refusal}); free memory or use a smaller checkpoint"
            )
        # The views hold this object, and its destructor unmaps: no view can outlive its memory.
        self._memory = ffi.gc(ffi.cast("char *", region.base), lambda _: lib.glm53_region_unmap(region))
        self._region = region
        self._library = library
        self.num_bytes = num_bytes
        self.address = int(ffi.cast("uintptr_t", region.base))
        self.pages = Pages(region.pages)
        self.refusal = refusal if self.pages < pages else ""

    @property
    def pointer(self) -> Any:
        """The first byte as a C pointer, which keeps the memory alive."""
        return self._memory

    def array(self) -> NDArray[np.uint8]:
        """View all of it as uint8 (num_bytes,)."""
        return np.frombuffer(self._library.ffi.buffer(self._memory, self.num_bytes), np.uint8)

    def lock(self) -> None:
        """Lock it into memory. Raises OSError with the system's error number."""
        error = self._library.ffi.new("int32_t *")
        if self._library.lib.glm53_region_lock(self._region, error) != self._library.lib.GLM53_OK:
            raise OSError(error[0], os.strerror(error[0]))

    def abandon(self) -> None:
        """Never unmap it: a thread that cannot be ended still uses it."""
        self._library.ffi.gc(self._memory, None)

    def huge_bytes(self, smaps: Path = Path("/proc/self/smaps")) -> int | None:
        """Say how much of it lies in huge pages now, in bytes; None where the system does not tell."""
        try:
            text = smaps.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        return sum_huge_pages(text, self.address, self.address + self.num_bytes)


def sum_huge_pages(smaps: str, begin: int, end: int) -> int | None:
    """Add up the huge pages of the mappings that overlap [begin, end); None if the text names none.

    The kernel may report neighbouring mappings as one, so the sum is capped at the length.
    """
    total: int | None = None
    is_inside = False
    for line in smaps.splitlines():
        if head := _MAPPING.match(line):
            is_inside = int(head[1], 16) < end and begin < int(head[2], 16)
        elif is_inside and (entry := _HUGE_PAGES.match(line)):
            total = (total or 0) + int(entry[1]) * 1024
    return None if total is None else min(total, end - begin)


def _name(number: int) -> str:
    if number == 0:
        return ""
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
