"""Heat kept across restarts: which experts were popular, so that the cache starts warm.

What is kept is ResidencyPolicy.history, since the heat of the last passage says little about the next
conversation. One .npz: version int64 (), fingerprint str () of the checkpoint, heat float32 (layers,
experts). A file that does not fit is not an error: the server starts cold and says why.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.geometry import ExpertGeometry

VERSION = 1


@dataclass(frozen=True, slots=True)
class HeatFile:
    """What was found: heat float32 (num_keys,), or None and one line why not."""

    heat: NDArray[np.float32] | None
    reason: str | None = None


def save_heat(path: Path, heat: NDArray[np.float32], geometry: ExpertGeometry, fingerprint: str) -> None:
    """Write heat, float32 (num_keys,), whole or not at all. Raises OSError."""
    table = heat.reshape(geometry.num_layers, geometry.num_experts).astype(np.float32)
    # The process's number: two servers that share a file must not write into one part.
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            np.savez(file, version=np.int64(VERSION), fingerprint=np.str_(fingerprint), heat=table)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_heat(path: Path, geometry: ExpertGeometry, fingerprint: str) -> HeatFile:
    """Read heat if it belongs to this checkpoint and this version; never raises for a bad file."""
    try:
        # Opened here, not by numpy, which leaves the file open when it is no archive.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            version, mark = int(file["version"]), str(file["fingerprint"])
            heat = np.asarray(file["heat"])
    except FileNotFoundError:
        return HeatFile(None, f"{path}: no heat from an earlier run")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        return HeatFile(None, f"{path}: not a heat file: {error}")
    shape = (geometry.num_layers, geometry.num_experts)
    if version != VERSION:
        return HeatFile(None, f"{path}: version {version}, this program reads {VERSION}")
    if mark != fingerprint:
        return HeatFile(None, f"{path}: written for another checkpoint")
    if heat.shape != shape or heat.dtype != np.float32:
        return HeatFile(None, f"{path}: heat is {heat.dtype} {heat.shape}, need float32 {shape}")
    if not (np.isfinite(heat).all() and (heat >= 0).all() and (heat <= 1.0001).all()):
        return HeatFile(None, f"{path}: heat outside 0..1")
    return HeatFile(heat.reshape(-1))
