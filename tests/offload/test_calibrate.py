"""Calibration: the fit finds the truth, keeps to its time, and says what it could not find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from glm53srv.offload.calibrate import CostProbes, Timer, assume, calibrate, describe, gb_per_s
from glm53srv.offload.cost import COST_NAMES, CostModel, CostOverrides, default_costs

GUESS = default_costs(22)
TRUTH = CostModel(
    cpu_fixed_ms=0.2, cpu_expert_ms=0.5, zero_copy_ms=0.3, vram_expert_ms=0.02, gpu_fixed_ms=0.1
)
COPY_MS = 0.25
NONE = CostOverrides()


class Machine:
    """A device on a clock of its own: every job takes what it costs, and now and then far longer."""

    def __init__(self, slowness: float = 1.0, stall_every: int = 0) -> None:
        self.now_s = 50.0
        self.jobs: list[tuple[str, int]] = []
        self._slowness = slowness
        self._stall_every = stall_every

    def clock(self) -> float:
        return self.now_s

    def lane(self, name: str, fixed_ms: float, expert_ms: float) -> Timer:
        def run(num_experts: int) -> float:
            self.jobs.append((name, num_experts))
            elapsed_ms = self._slowness * (fixed_ms + num_experts * expert_ms)
            if self._stall_every and len(self.jobs) % self._stall_every == 0:
                elapsed_ms += 40.0
            self.now_s += elapsed_ms / 1e3
            return elapsed_ms

        return run

    def probes(self) -> CostProbes:
        return CostProbes(
            cpu=self.lane("cpu", TRUTH.cpu_fixed_ms, TRUTH.cpu_expert_ms),
            link=self.lane("link", TRUTH.gpu_fixed_ms, TRUTH.zero_copy_ms),
            vram=self.lane("vram", 0.1, TRUTH.vram_expert_ms),
            copy=self.lane("copy", 0.0, COPY_MS),
        )

    def names(self) -> set[str]:
        return {name for name, _ in self.jobs}


@pytest.mark.parametrize("stall_every", [0, 9])
def test_costs_are_those_of_the_machine_despite_stalls(stall_every: int) -> None:
    machine = Machine(stall_every=stall_every)
    found = calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=NONE)
    for name in COST_NAMES:
        assert getattr(found.costs, name) == pytest.approx(getattr(TRUTH, name), rel=0.02), name
        assert found.sources[name] == "measured"
    assert found.copy_ms == pytest.approx(COPY_MS, rel=0.02)
    assert found.notes == ()
    assert found.num_samples == len(machine.jobs) - 4  # a job of each lane warms it up


@pytest.mark.parametrize("slowness", [1.0, 20.0, 100.0])
def test_it_ends_in_time_however_slow_the_machine(slowness: float) -> None:
    machine = Machine(slowness)
    begin_s = machine.clock()
    found = calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=NONE, budget_s=1.0)
    warm_up_s = slowness * (0.7 + 0.4 + 0.12 + 0.25) / 1e3
    overshoot_s = (
        slowness * TRUTH.cpu_fixed_ms / 1e3
    )  # a small job behind a large one is thought to be shorter
    assert machine.clock() - begin_s <= 1.0 + warm_up_s + overshoot_s
    assert found.elapsed_s == pytest.approx(machine.clock() - begin_s)
    assert found.costs.cpu_expert_ms == pytest.approx(slowness * TRUTH.cpu_expert_ms, rel=0.02)


def test_a_first_job_that_waits_for_a_compiler_costs_no_lane_its_time() -> None:
    machine = Machine()
    probes = machine.probes()
    fast = probes.cpu
    first: list[int] = []

    def compiled_first(num_experts: int) -> float:
        if not first:
            first.append(num_experts)
            machine.now_s += 30.0
        return fast(num_experts)

    found = calibrate(replace(probes, cpu=compiled_first), machine.clock, guess=GUESS, overrides=NONE)
    assert set(found.sources.values()) == {"measured"}
    assert found.costs.cpu_expert_ms == pytest.approx(TRUTH.cpu_expert_ms, rel=0.02)
    assert found.elapsed_s > 30


def test_a_machine_too_slow_for_two_sizes_keeps_the_guess_and_says_so() -> None:
    machine = Machine(slowness=3000.0)
    found = calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=NONE)
    assert found.costs.cpu_expert_ms == GUESS.cpu_expert_ms
    assert found.sources["cpu_expert_ms"] == "assumed"
    assert any(note.startswith("the cpu lane was not measured") for note in found.notes)


def test_what_the_user_set_wins_and_is_not_timed() -> None:
    machine = Machine()
    overrides = CostOverrides(cpu_fixed_ms=0.05, cpu_expert_ms=0.9, zero_copy_ms=0.7)
    found = calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=overrides)
    assert found.costs == CostModel(0.05, 0.9, 0.7, found.costs.vram_expert_ms)
    assert found.costs.vram_expert_ms == pytest.approx(TRUTH.vram_expert_ms)
    assert machine.names() == {"vram", "copy"}
    assert found.sources == {
        "cpu_fixed_ms": "set",
        "cpu_expert_ms": "set",
        "zero_copy_ms": "set",
        "vram_expert_ms": "measured",
        "gpu_fixed_ms": "assumed",
    }


def test_one_of_the_workers_costs_set_leaves_the_other_measured() -> None:
    machine = Machine()
    found = calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=CostOverrides(0.05))
    assert found.costs.cpu_fixed_ms == 0.05
    assert found.costs.cpu_expert_ms == pytest.approx(TRUTH.cpu_expert_ms, rel=0.02)


def test_a_lane_that_a_device_lacks_is_assumed() -> None:
    machine = Machine()
    probes = CostProbes(cpu=machine.probes().cpu)
    found = calibrate(probes, machine.clock, guess=GUESS, overrides=NONE)
    assert found.costs.zero_copy_ms == GUESS.zero_copy_ms
    assert found.sources["zero_copy_ms"] == "assumed"
    assert found.copy_ms is None


def test_jobs_are_no_larger_than_a_device_takes() -> None:
    machine = Machine()
    calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=NONE, max_experts=4)
    assert {size for _, size in machine.jobs} == {1, 2, 4}


def test_times_that_do_not_grow_are_refused() -> None:
    machine = Machine()
    probes = CostProbes(cpu=machine.lane("cpu", 1.0, 0.0))
    found = calibrate(probes, machine.clock, guess=GUESS, overrides=NONE)
    assert found.costs == GUESS
    assert len(found.notes) == 1


def test_without_time_the_costs_are_assumed_or_set() -> None:
    found = assume(GUESS, CostOverrides(zero_copy_ms=0.7))
    assert (found.costs.zero_copy_ms, found.costs.cpu_expert_ms) == (0.7, GUESS.cpu_expert_ms)
    assert (found.sources["zero_copy_ms"], found.sources["cpu_expert_ms"]) == ("set", "assumed")


def test_the_summary_names_every_cost_its_source_and_the_rates() -> None:
    machine = Machine()
    found = calibrate(machine.probes(), machine.clock, guess=GUESS, overrides=CostOverrides(zero_copy_ms=0.5))
    costs, rates = describe(found, 10_000_000)
    assert "cpu_expert_ms=0.5(measured)" in costs
    assert "zero_copy_ms=0.5(set)" in costs
    assert "link_gb_s=20 " in rates
    assert "copy_gb_s=40 " in rates


def test_a_rate_is_bytes_by_time() -> None:
    assert gb_per_s(9_437_184, 0.378) == pytest.approx(24.97, rel=1e-3)
    assert gb_per_s(1, None) is None


def noisy(rng: np.random.Generator, lane: Timer) -> Callable[[int], float]:
    return lambda size: lane(size) * float(rng.lognormal(0.0, 0.1))


def test_noise_of_a_tenth_leaves_a_few_per_cent() -> None:
    machine, rng = Machine(), np.random.default_rng(3)
    probes = CostProbes(cpu=noisy(rng, machine.lane("cpu", 0.2, 0.5)))
    found = calibrate(probes, machine.clock, guess=GUESS, overrides=NONE)
    assert found.costs.cpu_expert_ms == pytest.approx(0.5, rel=0.08)
