"""Which process listens on a port, read from /proc: for the error that says the port is taken."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
"""TCP_LISTEN in the state column of /proc/net/tcp (include/net/tcp_states.h)."""


def port_owner(port: int, root: Path = Path("/")) -> str:
    """Give "name, pid 12" of a process that listens on a TCP port, "" if none is seen.

    The processes of other users are seen by root alone, and those outside a container by nobody in it.
    """
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port, root)}
    if not inodes:
        return ""
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # another user's, or just gone
            if any(_target(entry) in inodes for entry in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text(encoding='utf-8').strip()}, pid {process.name}"
    return ""


def _target(entry: Path) -> str:
    """Give what a descriptor leads to; "" for one that was closed since the folder was read."""
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def _listening_inodes(port: int, root: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()  # sl, local address:port in hexadecimal, remote, state, ..., inode
            if len(words) > 9 and words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
