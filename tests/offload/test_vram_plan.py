"""The division of VRAM: every byte accounted for, every limit respected."""

from __future__ import annotations

import numpy as np
import pytest

from glm53srv.errors import MachineError
from glm53srv.offload.elastic import LoanParams, loan_slots, max_chunk_tokens
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.look_ahead import MAX_AHEAD
from glm53srv.offload.vram_plan import GIB, VramOptions, explain, plan_vram

FULL = ExpertGeometry()


def test_a_24_gb_card_gets_the_published_number_of_slots() -> None:
    """13.8 GiB free and 1.5 reserved is what such a card leaves beside weights and 131k tokens of cache."""
    plan = plan_vram(FULL, int(13.8 * GIB), "fast", VramOptions(reserve_gib=1.5))
    assert 1312 <= plan.num_slots <= 1408
    assert plan.num_slots % 16 == 0
    assert plan.stage_slots == 288  # a whole layer fits into 2.6 GiB


def test_exact_mode_reserves_less() -> None:
    fast, exact = (plan_vram(FULL, 12 * GIB, mode).num_slots for mode in ("fast", "exact"))
    assert exact > fast


def test_options_bind() -> None:
    options = VramOptions(reserve_gib=2.0, stage_gib=1.0, elastic_gib=4.0, max_slots=1000)
    plan = plan_vram(FULL, 20 * GIB, "fast", options)
    assert plan.num_slots == 992
    assert plan.stage_slots == GIB // FULL.expert_bytes
    assert plan.elastic_slots == int(4.0 * GIB) // (32 * FULL.expert_bytes) * 32


def test_a_card_that_holds_everything_gets_every_expert() -> None:
    plan = plan_vram(FULL, 200 * GIB, "exact")
    assert plan.num_slots == FULL.num_keys // 32 * 32
    assert "all experts fit" in " ".join(line.reason for line in plan.lines)


def test_too_little_memory_says_what_to_change() -> None:
    with pytest.raises(MachineError, match=r"1\.50 GiB of VRAM free.*--cache-tokens.*GLM53_EC_RESERVE_GB"):
        plan_vram(FULL, int(1.5 * GIB), "fast")


def test_the_explanation_adds_up_to_what_is_free() -> None:
    plan = plan_vram(FULL, 14 * GIB, "fast")
    by_name = {line.name: line.num_bytes for line in plan.lines}
    used = [by_name[name] for name in ("reserve", "landing", "expert cache", "left over")]
    assert min(used) > 0
    assert sum(used) == by_name["free"]
    assert by_name["expert cache"] == plan.num_slots * FULL.expert_bytes
    assert all(line.reason for line in plan.lines)
    assert len(explain(plan)) == len(plan.lines)


def test_what_is_fetched_ahead_takes_two_buffers_each_and_one_more_for_several_rows() -> None:
    plans = [plan_vram(FULL, 14 * GIB, "fast", VramOptions(ahead=ahead)) for ahead in (0, 2, MAX_AHEAD)]
    held = [{line.name: line.num_bytes for line in plan.lines}["landing"] for plan in plans]
    assert held[1] - held[0] == 2 * 3 * FULL.expert_bytes
    assert held[2] - held[0] == 2 * MAX_AHEAD * FULL.expert_bytes
    assert [plan.ahead for plan in plans] == [0, 2, MAX_AHEAD]


@pytest.mark.parametrize("seed", range(30))
def test_invariants_hold_for_any_machine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = VramOptions(
        reserve_gib=float(rng.uniform(0, 3)),
        stage_gib=float(rng.uniform(0, 4)),
        elastic_gib=float(rng.uniform(0, 20)),
        max_slots=int(rng.integers(32, 15_000)),
    )
    free = int(rng.uniform(4, 150) * GIB)
    plan = plan_vram(FULL, free, "fast", options)
    assert 2 * plan.stage_slots + plan.activation_slots <= plan.elastic_slots < plan.num_slots
    assert plan.elastic_slots % plan.chunk_slots == plan.activation_slots % plan.chunk_slots == 0
    assert plan.num_slots * FULL.expert_bytes + options.reserve_bytes("fast") <= free
    assert all(line.num_bytes >= 0 for line in plan.lines)


def test_a_short_chunk_borrows_nothing() -> None:
    plan = plan_vram(FULL, 14 * GIB, "fast")
    assert loan_slots(plan, FULL.expert_bytes, 96, is_staged=False) == 0


def test_a_loan_grows_with_the_chunk_in_whole_chunks_of_slots() -> None:
    plan = plan_vram(FULL, 14 * GIB, "fast")
    loans = [loan_slots(plan, FULL.expert_bytes, n, is_staged=True) for n in (512, 2048, 4096, 8192)]
    assert loans == sorted(loans)
    assert loans[0] >= 2 * plan.stage_slots
    assert all(loan % plan.chunk_slots == 0 and loan <= plan.elastic_slots for loan in loans)


def test_the_longest_chunk_just_fits() -> None:
    plan = plan_vram(FULL, 14 * GIB, "fast")
    params = LoanParams()
    longest = max_chunk_tokens(plan, FULL.expert_bytes, params)
    needed = longest * params.activation_bytes_per_token
    room = plan.activation_slots * FULL.expert_bytes + params.free_activation_bytes
    assert needed <= room < needed + params.activation_bytes_per_token
    assert longest > 8192


def test_a_limit_below_a_chunk_makes_the_chunk_smaller() -> None:
    plan = plan_vram(FULL, 14 * GIB, "fast", VramOptions(max_slots=12))
    assert (plan.num_slots, plan.chunk_slots, plan.elastic_slots) == (12, 12, 0)


@pytest.mark.parametrize("page_mib", [0, 100, 151, 2048, 5000])
def test_what_pages_will_take_serves_as_slots_until_then(page_mib: int) -> None:
    page_bytes = page_mib * 2**20
    plan = plan_vram(FULL, 14 * GIB, "fast", page_bytes=page_bytes)
    full = plan_vram(FULL, 14 * GIB - page_bytes, "fast")
    chunk_bytes = plan.chunk_slots * FULL.expert_bytes
    assert plan.page_slots == page_bytes // chunk_bytes * plan.chunk_slots
    assert plan.num_slots - plan.page_slots == full.num_slots
    assert (plan.elastic_slots, plan.stage_slots, plan.activation_slots) == (
        full.elastic_slots,
        full.stage_slots,
        full.activation_slots,
    )
    by_name = {line.name: line.num_bytes for line in plan.lines}
    spent = sum(by_name[name] for name in ("reserve", "landing", "expert cache", "KV cache", "left over"))
    assert spent == by_name["free"]
    assert by_name["KV cache"] == page_bytes - plan.page_slots * FULL.expert_bytes < chunk_bytes
    assert by_name["of the cache: pages"] == plan.page_slots * FULL.expert_bytes


def test_no_page_slots_beyond_the_experts_that_there_are() -> None:
    plan = plan_vram(FULL, 200 * GIB, "exact", page_bytes=2 * GIB)
    assert (plan.num_slots, plan.page_slots) == (FULL.num_keys // 16 * 16, 0)
    limited = plan_vram(FULL, 14 * GIB, "fast", VramOptions(max_slots=1300), page_bytes=2 * GIB)
    assert limited.num_slots == 1296
    assert "the limit decides" in " ".join(line.reason for line in limited.lines)
    assert limited.page_slots < 16 * 16
