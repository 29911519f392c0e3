"""Where the demo model lies: what `serve` and `generate` take when no model is named.

In a checkout it is reference/demo/checkpoint. A wheel holds the same files as glm53srv/demo_checkpoint
(setup.py copies them), so that `pip install` and `glm53srv serve` are enough to try the server, offline. A
wheel built before the weights were there has none.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
WEIGHTS = "model.safetensors"


def find_demo_model(package_dir: Path = PACKAGE_DIR) -> Path | None:
    """Give the directory of the demo model that came with this package; None if none did."""
    for folder in (package_dir / "demo_checkpoint", package_dir.parent / "reference" / "demo" / "checkpoint"):
        if (folder / WEIGHTS).is_file():
            return folder
    return None
