"""The simulated device catches a policy that breaks the rules, and its clock adds up."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_params import ResidencyParams
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.simulate.device import SimulatedDevice, WrongExpertRead
from glm53srv.offload.simulate.prefill import StagedPrefill
from glm53srv.offload.simulate.profile import PROFILES, RTX3090_ONE_COPY, RTX3090_TWO_COPIES
from glm53srv.offload.simulate.replay import OffloadReplay
from glm53srv.offload.simulate.timing import StepTimer
from glm53srv.offload.vram_plan import VramPlan
from tests.offload.builders import SMALL, build_replay, profile, random_picks

EAGER = ResidencyParams(touch_window_steps=0, min_heat_gain=-2.0)


class MapsTooEarly(ResidencyPolicy):
    """Maps an expert when its copy is issued, not when it has landed."""

    def advance(self, landed_slots: NDArray[np.integer], max_admissions: int) -> ResidencyUpdate:
        update = super().advance(landed_slots, max_admissions)
        return replace(update, map_keys=update.copy_keys, map_slots=update.copy_slots)


class UnmapsTooLate(ResidencyPolicy):
    """Clears a victim's entry in the update that overwrites its slot."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(SMALL, num_slots, EAGER)
        self._late = np.empty(0, np.int32)

    def advance(self, landed_slots: NDArray[np.integer], max_admissions: int) -> ResidencyUpdate:
        update = super().advance(landed_slots, max_admissions)
        late, self._late = self._late, update.unmap_keys
        return replace(update, unmap_keys=late)


class LendsTooEarly(ResidencyPolicy):
    """Says that slots are lent as soon as they are called back."""

    @property
    def is_lent(self) -> bool:
        return True


def drive(policy: ResidencyPolicy, num_steps: int = 60) -> None:
    """Run a policy against a device that checks bytes."""
    loop = build_replay(policy.num_slots, copy_gb_s=0.3)
    loop = OffloadReplay(policy, loop.device, loop.budget, loop.cpu_count)
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        loop.step(random_picks(rng), 1)


def test_the_real_policy_reads_only_right_experts() -> None:
    drive(ResidencyPolicy(SMALL, 16, EAGER), num_steps=300)


def test_mapping_before_the_bytes_landed_is_caught() -> None:
    with pytest.raises(WrongExpertRead, match=r"layer \d+, expert \d+: slot \d+"):
        drive(MapsTooEarly(SMALL, 16, EAGER))


def test_overwriting_what_a_running_step_may_read_is_caught() -> None:
    with pytest.raises(WrongExpertRead):
        drive(UnmapsTooLate(16))


def test_using_slots_before_they_are_lent_is_caught() -> None:
    rng = np.random.default_rng(0)
    policy = LendsTooEarly(SMALL, 16, EAGER)
    loop = build_replay(16, copy_gb_s=50.0)
    loop = OffloadReplay(policy, loop.device, loop.budget, loop.cpu_count)
    for _ in range(30):
        loop.step(random_picks(rng), 1)
    loop.device.begin_step(random_picks(rng), policy.heat_table(), loop.cpu_count)
    policy.shrink(16)
    assert policy.is_lent
    loop.device.scribble(np.arange(policy.capacity, policy.num_slots))
    with pytest.raises(WrongExpertRead):
        loop.device.finish_step(1)


def test_table_of_device_and_policy_agree_after_every_step() -> None:
    loop = build_replay(16, EAGER)
    rng = np.random.default_rng(4)
    for _ in range(100):
        loop.step(random_picks(rng), 1)
        assert (loop.device.table == loop.policy.table()).all()


def test_finishing_a_step_that_did_not_begin_is_an_error() -> None:
    with pytest.raises(ValueError):
        build_replay().device.finish_step(1)


def test_copies_land_in_order_at_the_copy_rate() -> None:
    device = build_replay(copy_gb_s=1.0).device  # one expert per ms
    none, five = np.empty(0, np.int32), np.arange(5, dtype=np.int32)
    device.apply(ResidencyUpdate(none, none, none, five, five))
    device.elapse(2.5)
    assert device.take_landed().tolist() == [0, 1]
    device.elapse(0.5)
    assert device.take_landed().tolist() == [2]
    assert device.drain_copies() == pytest.approx(2.0)
    assert device.take_landed().tolist() == [3, 4]
    assert device.now_ms == pytest.approx(5.0)


def test_waiting_for_a_staged_batch_does_not_wait_for_copies_behind_it() -> None:
    device = build_replay(copy_gb_s=1.0).device
    first = device.stage(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32))
    device.stage(np.arange(3, 9, dtype=np.int32), np.arange(3, 9, dtype=np.int32))
    assert device.wait(first) == pytest.approx(3.0, abs=1e-3)
    device.check_reads(np.zeros(3, int), np.arange(3), np.arange(3))
    with pytest.raises(WrongExpertRead):
        device.check_reads(np.zeros(1, int), np.array([5]), np.array([5]))
    assert device.wait(first) == 0.0
    assert not len(device.take_landed())  # staged copies are not residency's


def counts(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def test_a_step_without_copies_costs_what_the_cost_model_says() -> None:
    machine = RTX3090_TWO_COPIES
    timer = StepTimer(machine, 9_437_184)
    hits, link, cpu = counts(3, 8, 0, 2), counts(1, 0, 0, 3), counts(4, 0, 8, 0)
    costs = machine.costs(9_437_184)
    layers = [costs.layer_ms(*row) for row in zip(hits.tolist(), link.tolist(), cpu.tolist(), strict=True)]
    time = timer.step(hits, link, cpu, 1, 0.0)
    assert time.total_ms == pytest.approx(12.8 + sum(layers), rel=1e-6)
    assert time.link_bytes == 4 * 9_437_184
    assert time.cpu_bytes == 12 * 9_437_184
    assert time.cpu_wait_ms == pytest.approx(
        sum(max(0.0, costs.cpu_ms(c) - costs.gpu_ms(h, m)) for h, m, c in zip(hits, link, cpu, strict=True))
    )


def test_copies_share_the_link_with_reads_and_never_exceed_it() -> None:
    timer = StepTimer(RTX3090_ONE_COPY, 9_437_184)
    alone = timer.step(counts(0), counts(4), counts(0), 1, 0.0)
    shared = timer.step(counts(0), counts(4), counts(0), 1, 1e12)
    assert shared.total_ms > alone.total_ms
    moved = shared.copied_bytes + shared.link_bytes
    assert moved <= shared.total_ms * 25.0e6 * 1.000001


def test_yielding_copies_do_not_slow_reads_down() -> None:
    machine = RTX3090_ONE_COPY.amended("y", "test", {"is_copy_yielding": True})
    timer = StepTimer(machine, 9_437_184)
    alone = timer.step(counts(2, 2), counts(4, 1), counts(1, 5), 1, 0.0)
    busy = timer.step(counts(2, 2), counts(4, 1), counts(1, 5), 1, 1e12)
    assert busy.total_ms == pytest.approx(alone.total_ms)
    assert busy.copied_bytes >= machine.fixed_ms[1] * 25.0e6 * 0.999


def test_lanes_together_never_exceed_the_ram() -> None:
    slow = RTX3090_ONE_COPY.amended("slow", "test", {"dram_gb_s": 40.0})
    time = StepTimer(slow, 9_437_184).step(counts(0), counts(8), counts(20), 1, 0.0)
    lanes_ms = time.total_ms - time.fixed_ms
    assert time.link_bytes + time.cpu_bytes <= lanes_ms * 40.0e6 * 1.000001
    free = StepTimer(RTX3090_ONE_COPY, 9_437_184).step(counts(0), counts(8), counts(20), 1, 0.0)
    assert time.total_ms > free.total_ms


def test_overlapped_lanes_take_the_longer_of_both() -> None:
    fused = RTX3090_ONE_COPY.amended("fused", "test", {"is_gpu_overlapped": True})
    costs = fused.costs(9_437_184)
    for hits, link in ((20, 1), (1, 3), (0, 2), (5, 0)):
        time = StepTimer(fused, 9_437_184).step(counts(hits), counts(link), counts(0), 1, 0.0)
        wanted = max(hits * costs.vram_expert_ms, link * costs.zero_copy_ms)
        assert time.total_ms - time.fixed_ms == pytest.approx(wanted)


def test_the_fixed_part_is_known_for_any_number_of_streams() -> None:
    fixed = [RTX3090_ONE_COPY.step_fixed_ms(count) for count in (1, 2, 3, 4, 8)]
    assert fixed == pytest.approx([12.8, 14.5, 17.25, 20.0, 20.0])


def test_every_constant_of_every_profile_has_a_source() -> None:
    for name, machine in PROFILES.items():
        assert machine.name == name
        assert all(len(source) > 5 for source in machine.sources.values())
    with pytest.raises(ValueError, match="no source"):
        replace(RTX3090_ONE_COPY, sources={})
    with pytest.raises(ValueError, match="must be positive"):
        profile(copy_gb_s=0.0)


@pytest.mark.parametrize(("streams", "misses"), [(1, 5), (2, 10), (4, 20)])
def test_even_layers_stay_above_the_closed_form_and_near_it(
    shared_dir: Path, streams: int, misses: int
) -> None:
    """The closed form shares misses in fractions and never waits: a floor, missed by one expert at most."""
    limits = runpy.run_path(str(shared_dir / "oracles" / "limits.py"), run_name="limits")
    hit = 1 - 42 * misses / limits["PICKS"][streams]
    reference = replace(limits["MACHINES"]["ref-fast"], hit={streams: hit})
    floor = limits["decode"](reference, streams)
    changes = {"cpu_fixed_ms": 1e-6, "cpu_expert_ms": 0.125, "vram_expert_ms": 1e-9}
    machine = RTX3090_TWO_COPIES.amended("x", "the closed form's", changes)
    costs = machine.costs(9_437_184)
    cpu = min(range(misses + 1), key=lambda n: costs.layer_ms(0, misses - n, n))
    layers = np.ones(42, int)
    time = StepTimer(machine, 9_437_184).step(0 * layers, (misses - cpu) * layers, cpu * layers, streams, 0.0)
    lanes_ms = time.total_ms - time.fixed_ms
    assert floor["lanes"] * 0.9999 <= lanes_ms <= floor["lanes"] + 42 * 0.125


def test_a_device_without_bytes_tracks_owners() -> None:
    device = SimulatedDevice(SMALL, 4, StepTimer(profile(), SMALL.expert_bytes))
    device.stage(np.array([5], np.int32), np.array([2], np.int32))
    with pytest.raises(WrongExpertRead):
        device.check_reads(np.array([0]), np.array([5]), np.array([2]))
    device.drain_copies()
    device.check_reads(np.array([0]), np.array([5]), np.array([2]))


def test_a_chunk_bound_by_computing_waits_for_its_first_layer_only() -> None:
    loop = build_replay(48, copy_gb_s=1.0)  # 24 experts of a layer take 24 ms
    loop.policy.shrink(48)
    for _ in range(3):
        loop.device.apply(loop.policy.advance(loop.device.take_landed(), 0))
    prefill = StagedPrefill(loop.policy, loop.device, VramPlan(48, 4, 48, 24, 0, ()))
    layers = [prefill.run_layer(np.arange(24), compute_ms=60.0) for _ in range(4)]
    assert [layer.wait_ms for layer in layers] == pytest.approx([24.0, 0.0, 0.0, 0.0], abs=0.01)
    assert [layer.num_staged for layer in layers] == [24] * 4
    assert loop.device.now_ms == pytest.approx(24.0 + 4 * 60.0, abs=0.01)


def test_a_chunk_bound_by_the_link_runs_at_its_rate() -> None:
    loop = build_replay(48, copy_gb_s=1.0)
    loop.policy.shrink(48)
    for _ in range(3):
        loop.device.apply(loop.policy.advance(loop.device.take_landed(), 0))
    prefill = StagedPrefill(loop.policy, loop.device, VramPlan(48, 4, 48, 24, 0, ()))
    for _ in range(4):
        prefill.run_layer(np.arange(24), compute_ms=5.0)
    assert loop.device.now_ms == pytest.approx(4 * 24.0 + 5.0, abs=0.01)
    with pytest.raises(ValueError, match="no layer left"):
        prefill.run_layer(np.arange(24), compute_ms=5.0)


def test_a_prefill_cannot_begin_before_its_slots_are_lent() -> None:
    loop = build_replay(48, EAGER)
    rng = np.random.default_rng(0)
    for _ in range(20):
        loop.step(random_picks(rng), 1)
    plan = VramPlan(48, 4, 40, 20, 0, ())
    with pytest.raises(ValueError, match="too few"):
        StagedPrefill(loop.policy, loop.device, plan)
    loop.policy.shrink(40)
    with pytest.raises(ValueError, match="not lent"):
        StagedPrefill(loop.policy, loop.device, plan)
