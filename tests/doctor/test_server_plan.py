"""The plan of VRAM and RAM against the published numbers, and its arithmetic against itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from glm53srv.model.config import load_model_config
from glm53srv.model.published import PUBLISHED
from glm53srv.model.weight_sizes import checkpoint_sizes, published_sizes
from glm53srv.offload.look_ahead import NUM_AHEAD, num_buffers_ahead
from glm53srv.offload.server_plan import (
    MIB,
    Basis,
    Demand,
    Room,
    ServerPlan,
    indexer_bytes_per_page,
    largest_cache_tokens,
    latent_bytes_per_token,
    plan_server,
    state_bytes_per_stream,
)
from glm53srv.offload.vram_plan import GIB
from tests.model.checkpoints import edit_json

WEIGHTS = published_sizes()
HOME_MACHINE = Room(24 * GIB, 128 * GIB)


def plan(room: Room = HOME_MACHINE, **changes: object) -> ServerPlan:
    demand = Demand("fast", 131_072, 4, 8192)
    demand = dataclasses.replace(demand, **changes)  # type: ignore[arg-type]  # a test names its own fields
    return plan_server(PUBLISHED, WEIGHTS, demand, room)


def test_the_built_in_dimensions_are_those_of_the_published_config(shared_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((shared_dir / "fixtures/glm" / name).read_bytes())
    # The file is that of the bf16 release; the EXL3 one adds this section.
    edit_json(
        tmp_path / "config.json",
        lambda root: root.update(quantization_config={"quant_method": "exl3", "codebook": "mul1"}),
    )
    assert load_model_config(tmp_path) == PUBLISHED


def test_the_built_in_weights_add_up_to_the_published_files() -> None:
    """125,179,521,581 B in all; the rest is the vision tower (0.56 B parameters, 5 bits) and headers."""
    experts = 42 * 288 * WEIGHTS.expert
    assert WEIGHTS.expert == 9_437_184
    assert experts == 114_152_177_664
    assert WEIGHTS.expert_scales == 12_096 * 36_864
    multi_token_prediction = 2_862_179_364
    text = experts + WEIGHTS.expert_scales + WEIGHTS.embedding + WEIGHTS.other
    rest = 125_179_521_581 - text - multi_token_prediction
    assert 0.35e9 < rest < 0.8e9


def test_caches_and_states_are_of_the_published_size() -> None:
    assert latent_bytes_per_token(PUBLISHED) == 11_264
    assert indexer_bytes_per_page(PUBLISHED) == 256 * 11 * 576
    assert state_bytes_per_stream(PUBLISHED) == int(142.375 * MIB)


def test_a_24_gb_card_gets_as_many_slots_as_the_published_engine() -> None:
    """1,312 and 1,376 in its runs, beside a whole cache of tokens; ours has others until that fills."""
    fast = plan()
    assert fast.fits
    assert fast.slots is not None
    assert 1312 <= fast.slots.num_slots - fast.slots.page_slots <= 1376
    assert fast.slots.page_slots >= 192
    assert fast.slots.stage_slots == 288


def test_a_larger_cache_costs_slots_only_once_it_fills() -> None:
    small, large = (plan(cache_tokens=tokens).slots for tokens in (65_536, 131_072))
    assert small is not None
    assert large is not None
    assert abs(large.num_slots - small.num_slots) <= large.chunk_slots
    assert large.num_slots - large.page_slots < small.num_slots - small.page_slots


def test_every_byte_of_vram_is_accounted_for() -> None:
    for room in (HOME_MACHINE, Room(23 * GIB, 120 * GIB, is_vram_free=True, is_ram_usable=True)):
        made = plan(room)
        total, *lines = [line for line in made.vram if not line.is_part]
        spent = sum(line.num_bytes for line in lines if line.name != "left for experts")
        assert spent == total.num_bytes == room.vram_bytes
        left = next(line for line in lines if line.name == "left for experts")
        tail = lines[lines.index(left) + 1 :]
        assert sum(line.num_bytes for line in tail) == left.num_bytes


def test_what_is_free_now_has_no_line_for_the_driver_or_the_system() -> None:
    measured = plan(Room(23 * GIB, 120 * GIB, is_vram_free=True, is_ram_usable=True))
    names = [line.name for line in (*measured.vram, *measured.ram)]
    assert "driver" not in names
    assert "system" not in names
    assert measured.vram[0].basis is measured.ram[0].basis is Basis.MEASURED


def test_ram_is_that_of_the_published_one_copy_run() -> None:
    """119.3 GB beside the system (exact mode, one copy)."""
    parts = [line for line in plan().ram[1:] if line.name != "system"]
    assert sum(line.num_bytes for line in parts) == pytest.approx(119.3e9, rel=0.001)


@pytest.mark.parametrize("ram_gib", [64, 112])
def test_too_little_ram_is_a_problem_that_names_both_numbers(ram_gib: int) -> None:
    made = plan(Room(24 * GIB, ram_gib * GIB))
    (problem,) = made.problems
    assert problem == f"RAM: 113.1 GiB needed, {ram_gib}.0 there: all experts lie in RAM"
    assert made.slots is not None


def test_too_little_vram_is_a_problem_that_names_what_is_short() -> None:
    made = plan(Room(10 * GIB, 128 * GIB))
    (problem,) = made.problems
    left_over = next(line for line in made.vram if line.name == "left for experts")
    fixed = sum(line.num_bytes for line in made.vram[1:] if line is not left_over)
    buffers = 16 + 2 * num_buffers_ahead(NUM_AHEAD)  # of experts of the link, and of guessed ones
    pages = (512 - 33) * 256 * (11_264 + 11 * 576)  # of a cache that is full
    short = fixed + pages + 1.25 * GIB + (16 + buffers) * WEIGHTS.expert - 10 * GIB
    assert float(problem.split()[1]) == pytest.approx(short / GIB, abs=0.006)
    assert made.slots is None


def test_the_largest_cache_is_the_border() -> None:
    def fits(cache_tokens: int) -> bool:
        return plan(cache_tokens=cache_tokens).slots is not None

    largest = largest_cache_tokens(fits, 4 * 4096)
    assert largest is not None
    assert largest % 256 == 0
    assert fits(largest)
    assert not fits(largest + 1)


def test_the_search_for_the_largest_cache_knows_its_ends() -> None:
    assert largest_cache_tokens(lambda tokens: False, 100) is None
    assert largest_cache_tokens(lambda tokens: True, 100) == 25_600
    for border in range(1, 101):
        assert largest_cache_tokens(lambda tokens, border=border: tokens <= 256 * border, 100) == 256 * border  # type: ignore[misc]


def test_tokens_are_rounded_up_to_pages() -> None:
    assert plan(cache_tokens=1).vram == plan(cache_tokens=256).vram


def test_a_chunk_that_cannot_borrow_enough_is_noted() -> None:
    assert not any("-chunk_size" in note for note in plan().notes)
    assert any("-chunk_size" in note for note in plan(chunk_tokens=32_768).notes)


def test_sizes_of_a_checkpoint_come_from_its_files(random_model_dir: Path) -> None:
    from glm53srv.model.checkpoint import Checkpoint

    model = load_model_config(random_model_dir)
    checkpoint = Checkpoint(random_model_dir)
    sizes = checkpoint_sizes(model, checkpoint)
    names = [name for name in checkpoint.names() if ".mlp.experts." in name]
    trellis = sum(checkpoint.info(name).num_bytes for name in names if name.endswith(".trellis"))
    num_experts = len({name.rpartition(".")[0].rpartition(".")[0] for name in names})
    assert sizes.expert * num_experts == trellis
    scales = sum(checkpoint.info(name).num_bytes for name in names if name.endswith((".suh", ".svh")))
    assert sizes.expert_scales == scales
    assert json.loads((random_model_dir / "config.json").read_text())["text_config"]["n_routed_experts"] > 0
