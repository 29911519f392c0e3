"""Reading what a reference panel is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm53srv.errors import ConfigError
from glm53srv.panel import FORMAT, load_panel, parse_texts


def test_all_positions_but_the_last_are_scored_unless_named() -> None:
    (text,) = parse_texts([{"name": "x", "ids": [5, 6, 7]}])

    assert text.positions == (0, 1)


@pytest.mark.parametrize("positions", [[], [-1], [3]])
def test_positions_outside_the_text_are_refused(positions: list[int]) -> None:
    with pytest.raises(ConfigError, match="text 0: positions"):
        parse_texts([{"ids": [5, 6, 7], "positions": positions}])


def test_a_panel_is_read_back(tmp_path: Path) -> None:
    entry: dict[str, object] = {"name": "x", "ids": [5, 6], "positions": [0], "top_ids": [[6, 4]]}
    entry["top_logprobs"] = [[-0.1, -3.0]]
    path = tmp_path / "panel.json"
    path.write_text(json.dumps({"format": FORMAT, "entries": [entry]}), encoding="utf-8")

    (read,) = load_panel(path)

    assert read.ids == (5, 6)
    assert read.top_logprobs == ((-0.1, -3.0),)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "else"}', encoding="utf-8")

    with pytest.raises(ConfigError, match="no panel file"):
        load_panel(path)
