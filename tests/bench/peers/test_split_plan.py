"""How many experts a layer the card holds."""

from __future__ import annotations

import pytest

from bench.errors import BadInput
from bench.peers.split_plan import CHUNK_BYTES, SCRATCH_BYTES, cache_bytes, plan_split
from glm53srv.machine import GIB
from glm53srv.model.published import PUBLISHED
from glm53srv.model.published_files import published_model


def test_a_24_gib_card_holds_the_31_experts_that_are_published_for_one() -> None:
    plan = plan_split(PUBLISHED, 24 * GIB, 131072)
    assert (plan.gpu_experts, plan.cpu_experts) == (31, 257)
    assert str(plan).startswith("31 of 288 experts a layer on the card")


@pytest.mark.parametrize("vram_gib", [13, 16, 24, 32, 48])
def test_one_expert_more_would_not_fit(vram_gib: int) -> None:
    plan = plan_split(PUBLISHED, vram_gib * GIB, 131072)
    fixed = plan.other_bytes + plan.cache_bytes + SCRATCH_BYTES + CHUNK_BYTES
    assert fixed + plan.gpu_experts * plan.layer_bytes <= vram_gib * GIB
    assert fixed + (plan.gpu_experts + 1) * plan.layer_bytes > vram_gib * GIB


def test_a_large_card_holds_all_and_no_more() -> None:
    assert plan_split(published_model(4), 80 * GIB, 4096).gpu_experts == 288


def test_fewer_layers_leave_more_of_the_card_to_each() -> None:
    whole, cut = (plan_split(model, 24 * GIB, 131072) for model in (PUBLISHED, published_model(15)))
    assert cut.gpu_experts > 4 * whole.gpu_experts


def test_a_card_that_is_too_small_is_told_what_would_do() -> None:
    with pytest.raises(BadInput, match=r"would hold one a layer: raise --vram") as caught:
        plan_split(PUBLISHED, 6 * GIB, 131072)
    enough = float(str(caught.value).split(" tokens, ")[1].split()[0])
    assert plan_split(PUBLISHED, int((enough + 0.06) * GIB), 131072).gpu_experts == 1


def test_the_cache_is_counted_as_the_package_lays_it_out() -> None:
    empty, one_page = cache_bytes(PUBLISHED, 0), cache_bytes(PUBLISHED, 256)
    # 11 layers of full attention: 512 latents, 2 * 128 index keys, 128 / 4 pooled keys, two bytes each.
    assert one_page - empty == 11 * 256 * 2 * (512 + 256 + 32)
    # 34 layers of linear attention, five states: 64 heads of 128 x 128 in float32, 3 * 8192 * 4 in bfloat16.
    assert empty == 34 * 5 * (64 * 128 * 128 * 4 + 3 * 8192 * 4 * 2)
