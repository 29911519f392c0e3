"""What lies in the directory of a fetched model: whose files, of which content, and how much of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from glm53srv.hub import RemoteFile

STATE_FILE = "state.json"
_HASH_BYTES = 2**22


def has_content(path: Path, file: RemoteFile, on_bytes: Callable[[int], None] | None = None) -> bool:
    """Tell whether a file on disk is the one of the repository, by SHA-256 or git's hash of it.

    on_bytes: called with the size of each piece that was hashed.
    """
    if path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(_HASH_BYTES):
            digest.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return digest.hexdigest() == file.identity


def size_of(path: Path) -> int:
    """Give a file's size in bytes, 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; an unbuffered write may take only some of them."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@dataclass(frozen=True, slots=True)
class FolderState:
    """What the state file says: whose files lie, or are to lie, in the directory. sizes: bytes, by path."""

    repo: str
    commit: str
    sizes: dict[str, int]


def read_state(work: Path) -> FolderState | None:
    """Read the state from the work folder; None when there is none that can be read."""
    try:
        return FolderState(**json.loads((work / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_state(work: Path, state: FolderState) -> None:
    """Write the state into the work folder."""
    (work / STATE_FILE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
