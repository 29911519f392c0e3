"""The ledger: the table follows the costs, copies follow the measured rate."""

from __future__ import annotations

import itertools

import pytest

from glm53srv.offload.calibrate import Calibration, assume
from glm53srv.offload.cost import CostModel, CostOverrides, Parts
from glm53srv.offload.cost_ledger import (
    EARLY_REFRESH_STEPS,
    FIRST_PROBE,
    MAX_PROBE,
    PROBE_STEPS,
    REFRESH_STEPS,
    CostLedger,
)

COSTS = CostModel(cpu_fixed_ms=0.1, cpu_expert_ms=0.2, zero_copy_ms=0.4, vram_expert_ms=0.03)
NONE = CostOverrides()


def make_ledger(overrides: CostOverrides = NONE, copy_ms: float | None = 0.5) -> CostLedger:
    calibration = Calibration(overrides.apply(COSTS), copy_ms, assume(COSTS, overrides).sources)
    return CostLedger(calibration, overrides, 8, "fast")


def run(ledger: CostLedger, num_steps: int, cpu_ms: float, gpu_ratio: float = 1.0) -> None:
    for _ in range(num_steps):
        ledger.observe_cpu([(size, 0.1 + size * cpu_ms) for size in (1, 2, 4, 6)])
        layers = [(hits, link) for hits in range(4) for link in range(1, 4)]
        ledger.observe_gpu([(h, m, gpu_ratio * (h * 0.03 + m * 0.4)) for h, m in layers])
        ledger.end_step()


def test_steady_costs_keep_the_table() -> None:
    ledger = make_ledger()
    first = ledger.table
    run(ledger, 5 * REFRESH_STEPS, cpu_ms=0.2)
    assert ledger.table is first
    assert ledger.num_tables == 1


def test_a_slower_cpu_gets_fewer_experts() -> None:
    ledger = make_ledger()
    before = ledger.table.copy()
    run(ledger, 1000, cpu_ms=0.6)
    assert ledger.costs.cpu_expert_ms == pytest.approx(0.6, rel=0.05)
    assert ledger.num_tables > 1
    assert ledger.table.sum() < before.sum()
    assert (ledger.table <= before).all()


def test_a_large_change_is_seen_early() -> None:
    ledger = make_ledger()
    run(ledger, EARLY_REFRESH_STEPS, cpu_ms=5.0)
    assert ledger.num_tables == 2
    run(ledger, EARLY_REFRESH_STEPS - 1, cpu_ms=5.0)
    assert ledger.num_tables == 2, "a table is remade every few steps at most"


def test_a_slower_gpu_gets_fewer_experts_and_both_its_costs_rise() -> None:
    ledger = make_ledger()
    before = ledger.table.sum()
    run(ledger, 1000, cpu_ms=0.2, gpu_ratio=3.0)
    assert ledger.costs.zero_copy_ms == pytest.approx(1.2, rel=0.1)
    assert ledger.costs.vram_expert_ms == pytest.approx(0.09, rel=0.1)
    assert ledger.table.sum() > before


def test_a_table_changes_only_at_the_end_of_a_step() -> None:
    ledger = make_ledger()
    run(ledger, REFRESH_STEPS - 1, cpu_ms=2.0)
    table = ledger.table
    ledger.observe_cpu([(4, 9.0)])
    assert ledger.table is table
    ledger.end_step()
    assert ledger.table is not table


def test_what_the_user_set_stays() -> None:
    ledger = make_ledger(CostOverrides(0.1, 0.2, 0.4))
    run(ledger, 1000, cpu_ms=5.0)
    assert ledger.costs.cpu_expert_ms == 0.2
    assert ledger.costs.zero_copy_ms == 0.4


def test_a_hidden_cost_stays_hidden() -> None:
    calibration = Calibration(CostModel(0.1, 0.2, 0.4, 0.0))
    ledger = CostLedger(calibration, NONE, 8, "fast")
    run(ledger, 10, cpu_ms=0.2)
    assert ledger.costs.vram_expert_ms == 0.0


def test_copies_follow_the_measured_rate() -> None:
    fast, slow = make_ledger(copy_ms=0.25), make_ledger(copy_ms=2.5)
    assert fast.grant(40.0) == 32  # 40 ms, a quarter of them, 0.25 ms each: 40, and 32 is the most
    assert slow.grant(40.0) == 4
    slow.spend(4)
    assert slow.grant(0.0) == 0


def test_the_report_shows_start_and_now() -> None:
    ledger = make_ledger(CostOverrides(zero_copy_ms=0.5))
    run(ledger, 500, cpu_ms=0.4)
    report = ledger.report(1_000_000)
    assert report.at_start.cpu_expert_ms == 0.2
    assert report.now.cpu_expert_ms > 0.3
    assert report.sources["zero_copy_ms"] == "set"
    assert report.link_gb_s == pytest.approx(2.0)
    assert report.copy_gb_s == pytest.approx(2.0)


def test_sharing_changes_the_table_and_nothing_else() -> None:
    ledger = make_ledger()
    whole = ledger.table
    ledger.share(Parts(16, 8))
    assert (ledger.table % 16 > 0).any()
    ledger.share(Parts(16, 0))
    assert (ledger.table == 16 * whole).all()
    assert (ledger.num_tables, ledger.costs) == (3, COSTS)


BUSY_AT_START = CostModel(1.784, 0.24, 0.2, 0.014)
"""Measured at the start of a machine whose cores were busy then: no job of eight misses pays."""


def live(ledger: CostLedger, num_steps: int, fixed_ms: float, expert_ms: float) -> list[int]:
    """Run steps of 42 layers, a third each with two, four and five misses; answers come a step late, as on a
    device.

    Gives the experts that each step gave the CPU of a layer with five.
    """
    given: list[int] = []
    posted: list[int] = []
    for _ in range(num_steps):
        num_cpu = [int(ledger.table[8 - misses, misses]) for misses in (2, 4, 5) for _ in range(14)]
        ledger.observe_cpu([(num, fixed_ms + num * expert_ms) for num in posted if num])
        ledger.observe_gpu([(3, 5 - num, 0.1 + 0.2 * (5 - num)) for num in num_cpu])
        ledger.end_step()
        posted = num_cpu
        given.append(num_cpu[-1])
    return given


def start_busy(overrides: CostOverrides = NONE) -> CostLedger:
    return CostLedger(Calibration(overrides.apply(BUSY_AT_START)), overrides, 8, "fast")


def test_workers_that_were_slow_at_start_are_asked_again() -> None:
    given = live(start_busy(), 2 * FIRST_PROBE, 0.05, 0.16)
    assert not any(given[:FIRST_PROBE])
    assert given[FIRST_PROBE : FIRST_PROBE + PROBE_STEPS] == [1] * PROBE_STEPS
    assert min(given[FIRST_PROBE + PROBE_STEPS :]) >= 1, "the probe's answers brought them back"
    assert given[-1] >= 2


def test_workers_that_were_slow_for_a_while_are_asked_again() -> None:
    ledger = make_ledger()
    live(ledger, 1000, 5.0, 1.0)
    assert ledger.table[3, 5] == 0
    assert live(ledger, 32 * FIRST_PROBE, 0.05, 0.16)[-1] >= 2


def test_workers_that_stay_slow_are_asked_ever_more_rarely() -> None:
    given = live(start_busy(), 3 * MAX_PROBE, 1.784, 0.24)
    probes = [at for at, num in enumerate(given) if num and not given[at - 1]]
    waits = [after - before - PROBE_STEPS for before, after in itertools.pairwise(probes)]
    assert probes[0] == FIRST_PROBE
    assert waits[0] < 2 * FIRST_PROBE + 8
    assert waits == sorted(waits)
    assert sum(given) == PROBE_STEPS * len(probes) == 8 * PROBE_STEPS


def test_nobody_is_asked_where_that_changes_nothing() -> None:
    pinned = start_busy(CostOverrides(cpu_fixed_ms=2.0, cpu_expert_ms=1.0))
    exact = CostLedger(Calibration(BUSY_AT_START), NONE, 8, "exact")
    for ledger in (pinned, exact):
        assert not any(live(ledger, 3 * FIRST_PROBE, 0.05, 0.16))


def test_a_probe_asks_for_an_expert_or_two_of_some_layers() -> None:
    ledger = CostLedger(Calibration(BUSY_AT_START), NONE, 8, "fast", Parts(16, 8))
    live(ledger, FIRST_PROBE, 0.05, 0.16)
    asked = {(h, m): int(ledger.table[h, m]) for h in range(9) for m in range(9)}
    for (hits, misses), parts in asked.items():
        wanted = {1: 16, 5: 16, 4: 32}.get(misses, 0)
        assert parts == (wanted if hits + misses <= 8 else 0)
