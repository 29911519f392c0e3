"""How many ids the tokenizer knows: the head may have more rows than that, which must never be sampled."""

from __future__ import annotations

import json
from pathlib import Path

from glm53srv.errors import CheckpointError


def count_token_ids(model_dir: Path, vocab_size: int) -> int:
    """Give one more than the largest id in tokenizer.json.

    Raises CheckpointError if the file is missing or malformed, or knows ids that the head does not have.
    """
    path = model_dir / "tokenizer.json"
    try:
        content = json.loads(path.read_bytes())
        ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
        largest = max(ids)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); it belongs to the model"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a tokenizer of the expected form ({error!r})") from error
    if type(largest) is not int or largest >= vocab_size:
        raise CheckpointError(f"{path}: knows id {largest}, config.json's vocab_size is {vocab_size}")
    return largest + 1
