"""Where a wrong set-up is built: a copy of the small model that may be broken, and commands run beside it."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
"""Numbers of <linux/prctl.h> and <linux/capability.h>."""

_LIBC = ctypes.CDLL(None, use_errno=True)

WEIGHTS = "model.safetensors"


@dataclass(slots=True)
class Workbench:
    """One wrong set-up in the making. arguments, environ: what the command gets besides --model."""

    folder: Path
    model_dir: Path
    arguments: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    closers: list[Callable[[], None]] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """Name a file of the model."""
        return self.model_dir / name

    def edit_json(self, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
        """Change a JSON file of the model."""
        value = json.loads(self.path(name).read_bytes())
        edit(value)
        self.path(name).write_text(json.dumps(value))

    def edit_header(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Change the header of the weights, and leave their data."""
        content = self.path(WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        self.path(WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    def tensor_names(self) -> list[str]:
        """Give the names of the weights."""
        with self.path(WEIGHTS).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return [name for name in json.loads(file.read(length)) if name != "__metadata__"]

    def close(self) -> None:
        """Give back what the set-up holds."""
        for closer in self.closers:
            closer()


def make_workbench(model: Path, folder: Path) -> Workbench:
    """Copy the model into an empty folder."""
    shutil.copytree(model, folder / "model")
    return Workbench(folder, folder / "model")


def run_glm53srv(
    arguments: list[str],
    environ: Mapping[str, str],
    folder: Path,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of this checkout in a folder, without the caller's own settings.

    before: runs in the child first.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("GLM53_", "HF_"))}
    own = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "glm53srv", *arguments],
        cwd=folder,
        env={**inherited, **own, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        preexec_fn=before,
    )


def heed_permissions() -> None:
    """Give up root's power to read and write what the permission bits forbid; nothing changes for others.

    Runs in a child before the command starts, which is when the bounding set takes effect (capabilities(7)).
    """
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        _LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
