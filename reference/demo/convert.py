"""Prepare conversion: training weights to a Hugging Face directory, and calibration rows of the model's own
data.

    python -m reference.demo.convert WEIGHTS_DIR HF_DIR            (no WEIGHTS_DIR: "-", an untrained model)
    python -m exllamav3.conversion.convert_model -i HF_DIR -w WORK -o OUT -b 3 -hq -hb 6 -mb 3 -vb 16 \\
        -cd HF_DIR/../calibration.safetensors -cr 128 -cc 1024
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from reference.demo.export import write_directory
from reference.demo.model import DemoModel
from reference.demo.packing import make_rows
from reference.demo.shape import Shape
from reference.demo.train import FILES, load_weights

CALIBRATION_SEED = 900_001
"""Far behind the last batch that training reads."""


def write_calibration(path: Path, num_rows: int, row_tokens: int) -> None:
    """Write packed rows as the converter reads them (input_ids (rows, tokens))."""
    rows = make_rows(CALIBRATION_SEED, num_rows, row_tokens)
    save_file({"input_ids": torch.from_numpy(rows.ids.astype("int64"))}, path)


def main() -> None:
    weights, directory = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(1)
    model = DemoModel(Shape())
    if weights != "-":
        load_weights(model, Path(weights))
    write_directory(model, FILES, directory)
    write_calibration(directory.parent / "calibration.safetensors", 128, 1024)


if __name__ == "__main__":
    main()
