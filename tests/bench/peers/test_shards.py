"""Places of tensors in files that are planned before anything is drawn."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.peers.shards import Shard, ShardFile, plan_shards
from glm53srv.engine.cuda.synthetic_plan import tensor_specs
from glm53srv.model.checkpoint import MUL1_MULTIPLIER, Checkpoint
from glm53srv.model.config import ModelConfig, load_model_config
from glm53srv.model.published_files import published_model
from glm53srv.model.safetensors_file import TensorInfo
from glm53srv.model.tensor_needs import all_needs

MAX_BYTES = 400_000


@pytest.fixture(scope="module")
def config(random_model_dir: Path) -> ModelConfig:
    return load_model_config(random_model_dir)


@pytest.fixture(scope="module")
def shards(config: ModelConfig) -> list[Shard]:
    return plan_shards(config, MAX_BYTES)


def pattern(place: TensorInfo) -> NDArray[np.uint8]:
    if place.name.endswith(".mul1"):  # the one tensor whose value a reader checks
        return np.array([MUL1_MULTIPLIER], np.uint32).view(np.uint8)
    rng = np.random.default_rng(zlib.crc32(place.name.encode()))
    return rng.integers(0, 256, place.num_bytes, np.uint8)


def test_every_tensor_has_one_place_and_no_file_is_too_large(
    config: ModelConfig, shards: list[Shard]
) -> None:
    names = [place.name for shard in shards for place in shard.places]
    assert len(shards) > 3
    assert sorted(names) == sorted(name for name, _ in tensor_specs(config))
    for shard in shards:
        data = sum(place.num_bytes for place in shard.places)
        assert data <= MAX_BYTES or len(shard.places) == 1
        assert len({shard.file_name for shard in shards}) == len(shards)


def test_tensors_lie_one_behind_the_other_each_aligned_to_its_elements(shards: list[Shard]) -> None:
    for shard in shards:
        end = len(shard.head)
        for place in shard.places:
            assert place.offset == end
            assert place.offset % place.item_bytes == 0
            end += place.num_bytes
        assert end == shard.num_bytes


def test_what_was_written_is_what_the_reader_finds(
    config: ModelConfig, shards: list[Shard], tmp_path: Path
) -> None:
    for shard in shards:
        file = ShardFile(tmp_path, shard)
        for place in reversed(shard.places):  # in any order
            file.write(place, pattern(place))
        file.close()
        assert (tmp_path / shard.file_name).stat().st_size == shard.num_bytes

    checkpoint = Checkpoint(tmp_path)

    checkpoint.check(all_needs(config))
    for shard in shards:
        for place in shard.places:
            stored = checkpoint.raw(place.name, place.shape, (place.dtype,))
            assert np.array_equal(np.ascontiguousarray(stored).reshape(-1).view(np.uint8), pattern(place))


def test_data_of_another_size_is_refused(shards: list[Shard], tmp_path: Path) -> None:
    file, place = ShardFile(tmp_path, shards[0]), shards[0].places[0]
    with pytest.raises(ValueError, match="bytes"):
        file.write(place, np.zeros(place.num_bytes + 1, np.uint8))
    file.close()


def test_a_file_that_is_there_is_not_overwritten(shards: list[Shard], tmp_path: Path) -> None:
    (tmp_path / shards[0].file_name).write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        ShardFile(tmp_path, shards[0])


def test_fifteen_published_layers_take_what_their_matrices_take() -> None:
    shards = plan_shards(published_model(15))
    total = sum(shard.num_bytes for shard in shards)
    experts = 12 * 288 * 9_437_184
    # Beside the routed experts: their scales (127 MB), and of the whole model's 7.5 GB the part of 15 layers,
    # embeddings and head (3.7 GB).
    assert experts + 3.6e9 < total < experts + 3.9e9
    assert all(shard.num_bytes < 5_002_000_000 for shard in shards)
