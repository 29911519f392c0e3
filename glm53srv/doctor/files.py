"""Checks of the checkpoint's files by name, index, header and size; no tensor is read."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from glm53srv.doctor.findings import Finding, ok, warn
from glm53srv.errors import CheckpointError
from glm53srv.model.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
FETCH = "fetch the checkpoint again, `glm53srv download` continues what is there"

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_shards(model_dir: Path) -> None:
    """Check that no file is missing, by the shards' numbers and by the index.

    Raises CheckpointError that names the first missing file and their count.
    """
    present = {path.name for path in model_dir.glob("*.safetensors")}
    wanted = {name for name in present for name in _siblings(name)}
    index = _read_index(model_dir / INDEX)
    wanted |= set(index.values())
    missing = sorted(wanted - present)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{model_dir}: {missing[0]}{more} is missing; {FETCH}")


def check_index(model_dir: Path, checkpoint: Checkpoint) -> None:
    """Check that every tensor of the index lies in the file it names.

    Raises CheckpointError: files of different versions lie side by side.
    """
    index = _read_index(model_dir / INDEX)
    wrong = [
        name for name, file in index.items() if name not in checkpoint or checkpoint.path(name).name != file
    ]
    if wrong:
        raise CheckpointError(
            f"{model_dir / INDEX}: {wrong[0]} is not in {index[wrong[0]]} ({len(wrong)} of {len(index)} "
            f"tensors are elsewhere or nowhere): files of different versions; {FETCH}"
        )


def check_sizes(checkpoint: Checkpoint) -> Finding:
    """Compare the files' sizes with the ends of their tensors; too short ones do not get here."""
    ends: dict[Path, int] = {}
    for name in checkpoint.names():
        info, path = checkpoint.info(name), checkpoint.path(name)
        ends[path] = max(ends.get(path, 0), info.offset + info.num_bytes)
    longer = [(path, path.stat().st_size - end) for path, end in ends.items() if path.stat().st_size > end]
    total = sum(path.stat().st_size for path in ends)
    if longer:
        path, extra = longer[0]
        return warn("files", f"{path} has {extra} bytes behind its last tensor", FETCH)
    count = f"{len(ends)} {'file' if len(ends) == 1 else 'files'}"
    return ok("files", f"{count}, {total / 1e9:.2f} GB, as long as their headers say")


def check_revision(model_dir: Path, wanted: str | None) -> list[Finding]:
    """Compare the commits that the download noted with each other, and with the one that was asked for.

    `glm53srv download` notes it in .download/state.json. The hub's own library does so in the name of a
    snapshot's folder, and in a local folder in .cache/huggingface/download/*.metadata, first line. Nothing
    noted: nothing is found.
    """
    commits = read_commits(model_dir)
    if not commits:
        return []
    if len(commits) > 1:
        names = " and ".join(sorted(commit[:12] for commit in commits)[:2])
        return [warn("revision", f"files of several commits lie in {model_dir}: {names}", FETCH)]
    commit = next(iter(commits))
    if wanted is not None and _COMMIT.fullmatch(wanted) and wanted != commit:
        text = f"{model_dir} holds commit {commit[:12]}, GLM53_MODEL_REVISION asks for {wanted[:12]}"
        return [warn("revision", text, f"{FETCH}, or unset GLM53_MODEL_REVISION")]
    return [ok("revision", f"commit {commit}")]


def read_commits(model_dir: Path) -> set[str]:
    """Give the commits the files came from, as far as the download noted them."""
    resolved = model_dir.resolve()
    if resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name):
        return {resolved.name}
    commits = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not fetched by us
        commits.add(str(json.loads((model_dir / ".download/state.json").read_bytes())["commit"]))
    for path in sorted(model_dir.glob(".cache/huggingface/download/*.metadata")):
        if not (model_dir / path.name.removesuffix(".metadata")).exists():
            continue  # the note of a file that was removed
        try:
            first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        except OSError:
            continue
        if _COMMIT.fullmatch(first):
            commits.add(first)
    return commits


def largest_file(checkpoint: Checkpoint) -> Path:
    """Give the largest file of weights."""
    paths = {checkpoint.path(name) for name in checkpoint.names()}
    return max(paths, key=lambda path: path.stat().st_size)


def _siblings(name: str) -> list[str]:
    """Give the names of all shards of the set that `name` belongs to."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return [name]
    stem, total = match[1], int(match[3])
    return [f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]


def _read_index(path: Path) -> Mapping[str, str]:
    """Give file names by tensor; empty without an index. Raises CheckpointError if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
        index = content["weight_map"]
        pairs = [(name, file) for name, file in index.items() if isinstance(file, str)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {FETCH}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an index of weights; {FETCH}") from error
    return dict(pairs)
