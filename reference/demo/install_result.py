"""Put a converted checkpoint, and the references made of it, in their places in the repository.

    python -m reference.demo.install_result CHECKPOINT [REFERENCES]

CHECKPOINT: what exllamav3's converter wrote. REFERENCES: the folder with reference_run's two files. Checked
first: tokenizer, template and generation settings are those the model was trained with (the ones here), the
server's own reader finds every tensor that it needs, and the whole is small enough for git. Nothing is
written otherwise. No torch, no GPU.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from glm53srv.errors import CheckpointError, Glm53Error
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import DEMO_KIND, load_model_config
from glm53srv.model.tensor_needs import all_needs
from reference.demo.panel_chats import add_chats

HERE = Path(__file__).resolve().parent
CHECKPOINT_DIR = HERE / "checkpoint"
REFERENCES_DIR = HERE.parent

FIXED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
"""Files that training started from: a checkpoint with others was trained on other tokens."""
COPIED = ("processor_config.json", "model.safetensors")
"""The weights last: while they are missing there is no demo model, and a half-written one is never found."""
REWRITTEN = ("config.json", "quantization_config.json")
PANEL = "demo-exl3-ref-panel.json"
GREEDY = "demo-exl3-greedy.json"
MAX_BYTES = 20_000_000
"""Git keeps every version for ever."""


def install(source: Path, target: Path, references: Path | None = None, panels: Path | None = None) -> int:
    """Check a checkpoint and copy it to target, the references from one folder to another; gives bytes.

    Raises CheckpointError, one line, before anything is written.
    """
    missing = [name for name in (*FIXED, *COPIED, *REWRITTEN) if not (source / name).is_file()]
    if missing:
        raise CheckpointError(f"{source}: {', '.join(missing)} missing; is this the converter's output?")
    for name in FIXED:
        if (source / name).read_bytes() != (target / name).read_bytes():
            raise CheckpointError(f"{source / name}: differs from {target / name}, which training used")
    if references is not None:
        lacking = [name for name in (PANEL, GREEDY) if not (references / name).is_file()]
        if lacking:
            raise CheckpointError(f"{references}: {', '.join(lacking)} missing; run reference_run")
    Checkpoint(source).check(all_needs(load_model_config(source)))
    rewritten = {name: rewrite(name, json.loads((source / name).read_bytes())) for name in REWRITTEN}
    num_bytes = sum((source / name).stat().st_size for name in (*FIXED, *COPIED))
    num_bytes += sum(len(text.encode()) for text in rewritten.values())
    if num_bytes > MAX_BYTES:
        raise CheckpointError(f"{source}: {num_bytes} bytes, more than {MAX_BYTES}; convert to fewer bits")
    for name, text in rewritten.items():
        (target / name).write_text(text, encoding="utf-8")
    for name in COPIED:
        shutil.copyfile(source / name, target / name)
    if references is not None:
        install_references(references, target, panels or REFERENCES_DIR)
    return num_bytes


def install_references(source: Path, checkpoint: Path, target: Path) -> None:
    """Copy the panel, its entries' chat requests with it, and the greedy answers."""
    panel = json.loads((source / PANEL).read_bytes())
    add_chats(panel, Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    (target / PANEL).write_text(json.dumps(panel, separators=(",", ":")) + "\n", encoding="utf-8")
    shutil.copyfile(source / GREEDY, target / GREEDY)


def rewrite(name: str, content: dict[str, Any]) -> str:
    """Give the text of a file that is not copied as it is.

    config.json is marked, so that the model is not served under the published one's name. The second file
    repeats the tensors' headers for other tools; neither exllamav3 1.5.1's loader nor the server reads it. It
    belongs to a directory of this format all the same, and takes half the room without indentation.
    """
    if name == "config.json":
        return json.dumps({**content, "glm53srv": {"kind": DEMO_KIND}}, indent=4) + "\n"
    return json.dumps(content, separators=(",", ":")) + "\n"


def main(argv: Sequence[str]) -> int:
    if not 1 <= len(argv) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    references = Path(argv[1]) if len(argv) == 2 else None
    try:
        num_bytes = install(Path(argv[0]), CHECKPOINT_DIR, references)
    except Glm53Error as error:
        print(f"install_result: {error}", file=sys.stderr)
        return 1
    print(f"{CHECKPOINT_DIR}: {num_bytes} bytes of {MAX_BYTES}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
