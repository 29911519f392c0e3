"""Small model directories that a test can break."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any


def copy_model(source: Path, target: Path) -> Path:
    """Copy a model directory; gives the copy."""
    shutil.copytree(source, target)
    return target


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_bytes())
    edit(value)
    path.write_text(json.dumps(value))


def read_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Give header and data of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(path: Path, header: dict[str, Any], data: bytes) -> None:
    """Write a safetensors file, whatever the header says."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file and leave its data."""
    header, data = read_file(path)
    edit(header)
    write_file(path, header, data)
