"""The arena: every byte in its place, one copy, and clear words when it does not fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glm53srv.errors import CheckpointError, MachineError
from glm53srv.kernels import KernelPool
from glm53srv.machine import MachineFacts
from glm53srv.model.checkpoint import Checkpoint, CodebookName
from glm53srv.model.config import load_model_config
from glm53srv.model.linear import to_matrix
from glm53srv.offload.device.arena import ArenaOptions, ExpertArena, require_memory
from glm53srv.offload.device.layout import ALIGNMENT, Part, RecordLayout, expert_needs, plan_records
from glm53srv.offload.device.pinning import LockedMemory
from glm53srv.offload.device.region import Pages, Region, sum_huge_pages
from tests.model.checkpoints import copy_model, read_file, write_file
from tests.offload_device.conftest import Model


def every_part(model: Model, arena: ExpertArena) -> list[tuple[int, int, Part, str]]:
    return [
        (layer, expert, part, need.key)
        for layer in range(arena.geometry.num_layers)
        for expert in range(arena.geometry.num_experts)
        for part, need in zip(Part, expert_needs(model.config, layer, expert), strict=True)
    ]


def test_every_matrix_equals_the_checkpoint(model: Model, arena: ExpertArena) -> None:
    for layer, expert, part, key in every_part(model, arena):
        need = expert_needs(model.config, layer, expert)[part]
        assert need.key == key
        stored = model.checkpoint.quantized(need)
        np.testing.assert_array_equal(arena.trellis(layer, expert, part), stored.trellis)
        np.testing.assert_array_equal(arena.suh(layer, expert, part), stored.suh)
        np.testing.assert_array_equal(arena.svh(layer, expert, part), stored.svh)
        assert arena.layout.codebook is stored.codebook


def test_views_share_one_memory_and_are_aligned(arena: ExpertArena) -> None:
    layout = arena.layout
    assert arena.region.address % (2 * 2**20) == 0
    for layer, expert in ((0, 0), (3, 7), (6, 31)):
        base = arena.address(layer, expert)
        assert base == arena.record(layer, expert).ctypes.data
        for part in Part:
            matrix = arena.matrix(layer, expert, part)
            assert int(matrix.descriptor["trellis"][0]) == base + layout.offset(part)
            assert (base + layout.offset(part)) % ALIGNMENT == 0
    assert arena.geometry.expert_bytes == layout.record_bytes == arena.records.shape[1]


def test_kernels_compute_the_same_from_the_arena_as_from_the_file(model: Model, arena: ExpertArena) -> None:
    need = expert_needs(model.config, 2, 5)[Part.UP]
    x = np.random.default_rng(0).normal(size=(3, model.config.hidden_size)).astype(np.float32)
    with KernelPool(1) as pool:
        np.testing.assert_array_equal(
            pool.linear(x, arena.matrix(2, 5, Part.UP)),
            pool.linear(x, to_matrix(model.checkpoint.quantized(need))),
        )


def test_filled_arena_is_read_only(arena: ExpertArena) -> None:
    with pytest.raises(ValueError, match="read-only"):
        arena.record(0, 0)[0] = 1


def test_experts_that_do_not_exist_are_refused(arena: ExpertArena) -> None:
    for layer, expert in ((-1, 0), (0, -1), (7, 0), (0, 32)):
        with pytest.raises(IndexError):
            arena.record(layer, expert)


@pytest.mark.parametrize("num_readers", [1, 3])
def test_progress_reaches_the_end_and_names_the_speed(
    model: Model, machine: MachineFacts, num_readers: int
) -> None:
    seen: list[tuple[float, str]] = []
    ExpertArena.load(
        model.checkpoint,
        model.config,
        machine,
        ArenaOptions(num_readers=num_readers),
        lambda fraction, stage: seen.append((fraction, stage)),
    )
    assert [fraction for fraction, _ in seen] == sorted(fraction for fraction, _ in seen)
    assert seen[-1][0] == 1.0
    assert "GB/s" in seen[-1][1]


def test_samples_agree_with_the_files_and_repeat(arena: ExpertArena) -> None:
    report = arena.verify(20, seed=3)
    assert len(set(report.keys)) == 20
    assert report.num_bytes == 20 * arena.layout.record_bytes
    assert arena.verify(20, seed=3) == report
    assert arena.verify(10_000).num_bytes == arena.region.num_bytes


def test_a_changed_record_is_found_and_named(model: Model, machine: MachineFacts) -> None:
    damaged = ExpertArena.load(model.checkpoint, model.config, machine)
    damaged.records.flags.writeable = True
    damaged.record(4, 9)[damaged.layout.offset(Part.DOWN) + 17] ^= 1
    with pytest.raises(MachineError, match=r"down of expert 9, sparse layer 4 differs from .*check memory"):
        damaged.verify(10_000)


def test_views_outlive_the_arena(model: Model, machine: MachineFacts) -> None:
    view = ExpertArena.load(model.checkpoint, model.config, machine).trellis(0, 0, Part.GATE)
    need = expert_needs(model.config, 0, 0)[Part.GATE]
    np.testing.assert_array_equal(view, model.checkpoint.quantized(need).trellis)


def test_too_little_memory_says_how_much_is_needed(model: Model, machine: MachineFacts) -> None:
    small = replace(machine, available_bytes=2**30)
    with pytest.raises(MachineError, match=r"need 0\.\d\d GiB of memory .* 1\.00 are usable"):
        ExpertArena.load(model.checkpoint, model.config, small)
    require_memory(2**20, machine)


def test_memory_that_cannot_be_mapped_is_a_machine_error() -> None:
    with pytest.raises(MachineError, match="cannot map"):
        Region(2**60)


def test_locking_beyond_the_limit_names_the_limit() -> None:
    class Refusing(Region):
        def lock(self) -> None:
            raise OSError(12, "Cannot allocate memory")

    with pytest.raises(MachineError, match=r"the limit is .*ulimit -l unlimited.*LimitMEMLOCK"):
        LockedMemory().pin(Refusing(4096))


def test_kind_of_pages_is_reported_with_the_reason(
    model: Model, machine: MachineFacts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "glm53srv.offload.device.arena"):
        arena = ExpertArena.load(model.checkpoint, model.config, machine)
    assert f"pages={arena.region.pages.name.lower()}" in caplog.text
    assert (arena.region.pages is Pages.HUGE) == (arena.region.refusal == "")
    assert arena.region.refusal in caplog.text


def test_huge_pages_are_summed_from_the_kernels_table() -> None:
    smaps = (
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \nAnonHugePages:      2048 kB\nRss: 4096 kB\n"
        "7f0000400000-7f0000600000 rw-p 00000000 00:00 0 \nAnonHugePages:      2048 kB\n"
        "7f1000000000-7f1000200000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:      1024 kB\n"
    )
    assert sum_huge_pages(smaps, 0x7F0000000000, 0x7F0000600000) == 4 * 2**20
    assert sum_huge_pages(smaps, 0x7F1000000000, 0x7F1000080000) == 2**19
    assert sum_huge_pages(smaps, 0x1000, 0x2000) is None


def test_a_file_that_shrank_is_named(random_model_dir: Path, machine: MachineFacts, tmp_path: Path) -> None:
    model_dir = copy_model(random_model_dir, tmp_path / "model")
    checkpoint, config = Checkpoint(model_dir), load_model_config(model_dir)
    file = checkpoint.path(expert_needs(config, 6, 31)[Part.DOWN].key + ".trellis")
    layout, _ = plan_records(checkpoint, config)
    info = checkpoint.info(expert_needs(config, 6, 31)[Part.DOWN].key + ".trellis")
    with file.open("r+b") as opened:
        opened.truncate(info.offset + layout.num_bytes(Part.DOWN) // 2)
    with pytest.raises(CheckpointError, match=f"{file.name}: ended at byte"):
        ExpertArena.load(checkpoint, config, machine)


def test_experts_of_two_forms_are_refused_by_name(random_model_dir: Path, tmp_path: Path) -> None:
    model_dir = copy_model(random_model_dir, tmp_path / "model")
    config = load_model_config(model_dir)
    key = expert_needs(config, 3, 8)[Part.UP].key
    file = Checkpoint(model_dir).path(f"{key}.trellis")
    header, data = read_file(file)
    entry = header[f"{key}.trellis"]
    begin, end = entry["data_offsets"]
    entry["shape"][2] = 32
    kept = (end - begin) * 2 // 3
    entry["data_offsets"] = [begin, begin + kept]
    for name, other in header.items():
        if name != "__metadata__" and other["data_offsets"][0] >= end:
            other["data_offsets"] = [offset - (end - begin - kept) for offset in other["data_offsets"]]
    write_file(file, header, data[: begin + kept] + data[end:])
    with pytest.raises(CheckpointError, match=r"expert 8 of layer 4 has 3/2/3 bits .* has 3/3/3 bits"):
        plan_records(Checkpoint(model_dir), config)


def test_layout_of_the_published_model() -> None:
    layout = RecordLayout(4096, 2048, (48, 48, 48), CodebookName.MUL1)
    assert layout.record_bytes == 9_437_184
    assert [layout.offset(part) for part in Part] == [0, 3_145_728, 6_291_456]
    assert layout.num_scales * 2 == 36_864
    assert layout.scale_range(Part.DOWN, is_output=True) == slice(14_336, 18_432)
