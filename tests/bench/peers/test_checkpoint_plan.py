"""How much is written, and where not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.errors import BadInput
from bench.peers.checkpoint import (
    MARKER,
    SPARE_DISK_BYTES,
    Drawn,
    choose_layers,
    disk_bytes,
    free_disk_bytes,
    read_marker,
    write_checkpoint,
    write_tokenizer,
)
from bench.peers.shards import plan_shards
from glm53srv.errors import ConfigError, MachineError
from glm53srv.machine import GIB, read_machine
from glm53srv.model.published_files import published_model
from glm53srv.model.vocabulary import count_token_ids

MACHINE = replace(read_machine(), available_bytes=100 * GIB, limit_bytes=None)


def room_for(layers: int) -> int:
    return disk_bytes(plan_shards(published_model(layers))) + SPARE_DISK_BYTES


@pytest.mark.parametrize(("free", "layers"), [(10**12, 15), (room_for(15), 15), (room_for(15) - 1, 14)])
def test_a_third_of_the_model_is_written_or_what_the_disk_holds(free: int, layers: int) -> None:
    assert choose_layers(free, None) == layers


def test_more_layers_are_written_if_they_are_wanted_and_fit() -> None:
    assert choose_layers(room_for(20), 20) == 20
    with pytest.raises(BadInput, match="--layers 19 fits"):
        choose_layers(room_for(20) - 1, 20)


def test_a_disk_that_holds_too_little_is_an_error() -> None:
    for wanted in (None, 4, 9):
        with pytest.raises(BadInput, match="free"):
            choose_layers(room_for(4) - 1, wanted)
    with pytest.raises(ConfigError):
        choose_layers(10**12, 46)


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match="is not empty"):
        write_checkpoint(tmp_path, 4, "cpu", MACHINE, 10**12)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_nothing_is_written_where_disk_or_memory_do_not_suffice(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(BadInput):
        write_checkpoint(target, 15, "cpu", MACHINE, 10**9)
    with pytest.raises(MachineError, match="host memory"):
        write_checkpoint(target, 15, "cpu", replace(MACHINE, available_bytes=20 * GIB), 10**12)
    assert not target.exists()


def test_a_finished_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    drawn = Drawn(15, 0, "cuda", 36)
    (tmp_path / MARKER).write_text(json.dumps(asdict(drawn)))
    assert write_checkpoint(tmp_path, None, "cuda", MACHINE, 0) == drawn
    assert write_checkpoint(tmp_path, 15, "cuda", MACHINE, 0) == drawn
    for layers, device in ((14, "cuda"), (15, "cpu")):
        with pytest.raises(BadInput, match="holds 15 layers"):
            write_checkpoint(tmp_path, layers, device, MACHINE, 10**12)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 15}'])
def test_an_unfinished_directory_has_no_marker(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    assert read_marker(tmp_path) is None


def test_free_space_is_known_before_the_directory_is_there(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "a/b/c") == pytest.approx(free_disk_bytes(tmp_path), rel=0.1)


def test_the_tokenizer_knows_every_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<0> <299> <7>").ids == [0, 299, 7]
    assert count_token_ids(tmp_path, 300) == 300
